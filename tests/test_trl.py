"""TRL's trainers take the configuration as any other of PEFT's."""

import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from naive import tiny_model
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from preproj import PreProjConfig

IDS = torch.randint(0, 257, (2, 9), generator=torch.Generator().manual_seed(0))
TEXTS = Dataset.from_list([{"text": f"{i} content goes around attention"} for i in range(20)])
PREFERENCES = Dataset.from_list(
    [{"prompt": f"{i}?", "chosen": " content goes around", "rejected": " attention only"} for i in range(20)]
)
QUICK = {
    "learning_rate": 0.01, "max_steps": 8, "logging_steps": 1, "report_to": [], "disable_tqdm": True,
    "save_strategy": "no", "use_cpu": True,
}  # fmt: skip


def base_model(architecture: str) -> PreTrainedModel:
    return tiny_model(architecture, vocab_size=257).float()


def losses(trainer: SFTTrainer | DPOTrainer) -> list[float]:
    return [step["loss"] for step in trainer.state.log_history if "loss" in step]


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("architecture", "dtype", "bf16"),
    [("llama", torch.float32, False), ("gpt_neox", torch.bfloat16, True), ("gpt2", torch.float32, True)],
)
def test_sft_trains_the_new_weights_alone(architecture, dtype, bf16, byte_tokenizer, tmp_path):
    base = base_model(architecture).to(dtype)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    trainer = SFTTrainer(
        model=base,
        args=SFTConfig(str(tmp_path), bf16=bf16, **QUICK),
        train_dataset=TEXTS,
        processing_class=byte_tokenizer,
        peft_config=PreProjConfig(task_type="CAUSAL_LM"),
    )
    trainer.train()
    assert trainer.model.is_gradient_checkpointing  # TRL's default
    assert losses(trainer)[-1] < 0.9 * losses(trainer)[0]
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}

    trainer.save_model(str(tmp_path))
    trained = trainer.model.state_dict()
    loaded = PeftModel.from_pretrained(base_model(architecture).to(dtype), tmp_path).state_dict()
    assert_same(loaded, trained)
    assert_same(trainer.model.unload().state_dict(), before)


def dpo(model: torch.nn.Module, out: Path, tokenizer: object, config: PreProjConfig | None = None) -> DPOTrainer:
    args = DPOConfig(str(out), bf16=False, **QUICK)
    return DPOTrainer(model=model, args=args, train_dataset=PREFERENCES, processing_class=tokenizer, peft_config=config)


def test_dpo_has_the_base_as_its_reference(byte_tokenizer, tmp_path):
    plain = base_model("llama")(IDS).logits
    trainer = dpo(base_model("llama"), tmp_path, byte_tokenizer, PreProjConfig(skip_init_std=0))
    assert trainer.ref_model is None
    trainer.train()
    # -log σ(0), because a fresh adapter is its own reference
    assert losses(trainer)[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses(trainer)[-1] < 0.5
    trained = trainer.model.eval()
    assert not torch.equal(trained(IDS).logits, plain)
    with trained.disable_adapter():
        assert torch.equal(trained(IDS).logits, plain)


def test_dpo_of_a_trained_adapter_has_its_start_as_the_reference(byte_tokenizer, tmp_path):
    model = get_peft_model(base_model("llama"), PreProjConfig(init_weights=False)).eval()
    start = model(IDS).logits
    trainer = dpo(model, tmp_path, byte_tokenizer)
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses(trainer)[-1] < 0.5
    model.eval()
    assert not torch.equal(model(IDS).logits, start)
    model.set_adapter("ref")
    assert torch.equal(model(IDS).logits, start)
