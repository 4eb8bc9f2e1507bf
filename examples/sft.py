"""Fine-tune pre-projection and content skip on chats or text with TRL's SFTTrainer, as with any PEFT method.

python examples/sft.py EleutherAI/pythia-160m my-chats.jsonl out/

Each line of the file is one example in a form that TRL knows: {"text": ...}, {"prompt": ..., "completion": ...}, or
{"messages": [{"role": "user", "content": ...}, ...]} where the tokenizer has a chat template.
"""

import argparse

from datasets import load_dataset
from peft import TaskType
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from preproj import PreProjConfig


def main() -> None:
    """Train on the examples of a JSON lines file and save the adapter."""
    parser = argparse.ArgumentParser(description="Fine-tune pre-projection and content skip with TRL's SFTTrainer.")
    parser.add_argument("model", help="a folder of save_pretrained, or a Hub name, of a causal language model")
    parser.add_argument("data", help="a file of examples, one JSON object a line")
    parser.add_argument("out", help="the folder for the adapter")
    parser.add_argument("--max-steps", type=int, default=20, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-5, help="peak (default: %(default)s)")
    given = parser.parse_args()

    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(given.model, dtype="float32"),
        args=SFTConfig(
            given.out,
            learning_rate=given.learning_rate,
            max_steps=given.max_steps,
            max_length=256,
            logging_steps=5,
            bf16=False,  # TRL's default, mixed precision, needs a GPU (or use_cpu=True)
            report_to=[],
        ),
        train_dataset=load_dataset("json", data_files=given.data, split="train"),
        peft_config=PreProjConfig(task_type=TaskType.CAUSAL_LM),
    )
    trainer.model.print_trainable_parameters()
    trainer.train()
    trainer.save_model(given.out)


if __name__ == "__main__":
    main()
