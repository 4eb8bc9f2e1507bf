"""Fine-tune pre-projection and content skip with transformers' Trainer, as with any PEFT method.

python examples/finetune.py EleutherAI/pythia-160m my-text.txt out/

Each line of the file is one example.
"""

import argparse

from datasets import load_dataset
from peft import TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from preproj import PreProjConfig


def main() -> None:
    """Train on the lines of a text file and save the adapter."""
    parser = argparse.ArgumentParser(description="Fine-tune pre-projection and content skip with the Trainer.")
    parser.add_argument("model", help="a folder of save_pretrained, or a Hub name, of a causal language model")
    parser.add_argument("data", help="a text file, one example a line")
    parser.add_argument("out", help="the folder for the adapter")
    parser.add_argument("--max-steps", type=int, default=20, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-5, help="peak (default: %(default)s)")
    given = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    base = AutoModelForCausalLM.from_pretrained(given.model, dtype="float32")
    model = get_peft_model(base, PreProjConfig(task_type=TaskType.CAUSAL_LM))
    model.print_trainable_parameters()

    lines = load_dataset("text", data_files=given.data, split="train").filter(lambda row: row["text"].strip())
    tokens = lines.map(
        lambda rows: tokenizer(rows["text"], truncation=True, max_length=256), batched=True, remove_columns=["text"]
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            given.out, learning_rate=given.learning_rate, max_steps=given.max_steps, logging_steps=5, report_to=[]
        ),
        train_dataset=tokens,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model(given.out)


if __name__ == "__main__":
    main()
