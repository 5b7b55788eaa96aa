"""Writes tests/engine/fixtures/greedy_ALIAS.json: what transformers generates greedily, in float32, from the embedded models' dequantised weights.

Run where torch, transformers and accelerate are installed (a CPU build of torch: Python 3.11): python scripts/make_token_fixtures.py
The prompts' ids are our tokenizer's: transformers' GGUF path drops the pre-tokenizer of SmolLM2.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from jaxserve.config import ModelConfig
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.tokenizer import load_tokenizer
from tests.engine.prompts import PROMPTS

NUM_TOKENS = 64
FOLDER = Path(__file__).parent.parent / "tests/engine/fixtures"


def generate(model: torch.nn.Module, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
    """The argmax after each token, and how far the second largest logit was below it."""
    tokens: list[int] = []
    gaps: list[float] = []
    cache = None
    inputs = prompt_ids
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            output = model(torch.tensor([inputs]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            top = torch.topk(output.logits[0, -1], 2)
            tokens.append(int(top.indices[0]))
            gaps.append(round(float(top.values[0] - top.values[1]), 5))
            inputs = tokens[-1:]
    return tokens, gaps


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for alias in ("smollm2-135m", "gemma3-270m"):
        checkpoint = open_checkpoint(ModelConfig(source=alias))
        tokenizer = load_tokenizer(checkpoint)
        model = AutoModelForCausalLM.from_pretrained(checkpoint.path.parent, gguf_file=checkpoint.path.name, dtype=torch.float32).eval()
        rows = []
        for prompt in PROMPTS:
            prompt_ids = tokenizer.encode(prompt)
            tokens, gaps = generate(model, prompt_ids)
            rows.append({"prompt": prompt, "prompt_token_ids": prompt_ids, "token_ids": tokens, "gaps": gaps})
        text = "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"
        (FOLDER / f"greedy_{alias}.json").write_text(text)
        print(f"{alias}: {len(rows)} prompts, smallest gap {min(min(row['gaps']) for row in rows)}")


if __name__ == "__main__":
    main()
