"""Runs in TRL's environment: the losses of its SFTTrainer and DPOTrainer on given tokens, and their gradients.

Takes a directory with the checkpoints `model` and `reference` and with `pairs.json`, a list of [prompt, chosen,
rejected] token ids. Writes `losses.json` and the gradients as the checkpoints `ce` and `dpo`.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


def main() -> None:
    directory = Path(sys.argv[1])
    beta = float(sys.argv[2])
    pairs = json.loads((directory / "pairs.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    settings = {
        "output_dir": str(directory / "trainer"),
        "report_to": "none",
        "use_cpu": True,
        "max_length": None,
        "bf16": False,
        "gradient_checkpointing": False,
    }

    def model(name: str) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float32).eval()

    examples = {
        "ce": [
            {"input_ids": prompt + chosen, "labels": [-100] * len(prompt) + chosen}
            for prompt, chosen, _rejected in pairs
        ],
        "dpo": [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in pairs],
    }
    trainers = {
        "ce": SFTTrainer(
            model("model"),
            args=SFTConfig(**settings),
            train_dataset=Dataset.from_list(examples["ce"]),
            processing_class=tokenizer,
        ),
        "dpo": DPOTrainer(
            model("model"),
            ref_model=model("reference"),
            args=DPOConfig(**settings, beta=beta),
            train_dataset=Dataset.from_list([{"prompt": "Which", "chosen": " number", "rejected": " is"}]),
            processing_class=tokenizer,
        ),
    }
    losses = {}
    for name, trainer in trainers.items():
        trainer.model.eval()
        loss = trainer.compute_loss(trainer.model, trainer.data_collator(examples[name]))
        loss.backward()
        losses[name] = float(loss.detach())
        (directory / name).mkdir()
        gradients = {
            key: value.grad.contiguous() for key, value in trainer.model.named_parameters() if value.grad is not None
        }
        save_file(gradients, directory / name / "model.safetensors")
    (directory / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
