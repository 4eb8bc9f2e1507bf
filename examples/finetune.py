"""Fine-tune pre-projection and content skip with the Trainer, as with any PEFT method.

python examples/finetune.py EleutherAI/pythia-160m my-text.txt out/
"""

import sys

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


def main(model_name: str, text_file: str, out: str) -> None:
    """Train on the lines of a text file and save the adapter to ``out``."""
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    tokenizer.pad_token = tokenizer.eos_token
    base = AutoModelForCausalLM.from_pretrained(model_name, dtype="float32")
    model = get_peft_model(base, PreProjConfig(task_type=TaskType.CAUSAL_LM))
    model.print_trainable_parameters()

    lines = load_dataset("text", data_files=text_file, split="train").filter(lambda row: row["text"].strip())
    tokens = lines.map(
        lambda rows: tokenizer(rows["text"], truncation=True, max_length=128), batched=True, remove_columns=["text"]
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(out, learning_rate=3e-5, max_steps=20, logging_steps=5, report_to=[]),
        train_dataset=tokens,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    model.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
