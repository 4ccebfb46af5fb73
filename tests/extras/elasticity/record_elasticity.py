"""Writes elasticity_answers.json: results of DeepSpeed's own compute_elastic_config for 300 random sections.

    python -m tests.extras.elasticity.record_elasticity FOLDER   (deepspeed/elasticity of one up to 0.19.6)

Later versions have no elasticity, so the results are stored. Only its two files of arithmetic are run.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import random
import sys
import types
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).with_name("elasticity_answers.json")
NUMBER, SEED = 300, 20261122


def questions() -> list[dict[str, Any]]:
    """Sections and numbers of ranks; some of them have no answer."""
    draw = random.Random(SEED)
    found = []
    for _ in range(NUMBER):
        micros = sorted(draw.sample(range(1, 33), draw.randint(1, 4)))
        per_node = draw.choice([1, 1, 2, 4, 8])
        low = draw.randint(1, 40)
        section: dict[str, Any] = {
            "enabled": True,
            "max_train_batch_size": draw.choice([draw.randint(20, 200), draw.randint(200, 20000)]),
            "micro_batch_sizes": micros,
            "min_gpus": low,
            "max_gpus": draw.randint(low, 2000),
            "version": draw.choice([0.1, 0.2]),
            "prefer_larger_batch": draw.random() < 0.7,
        }
        world = draw.choice([0, draw.randint(1, 12), low]) * per_node
        if section["version"] == 0.2:
            section["num_gpus_per_node"] = per_node
            world = max(world, per_node)
        found.append({"section": section, "world": world})
    return found


def load(folder: Path) -> Any:
    """DeepSpeed's module without the rest of DeepSpeed."""
    for name in ("deepspeed", "deepspeed.elasticity"):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
    sys.modules["deepspeed.git_version_info"] = types.ModuleType("deepspeed.git_version_info")
    sys.modules["deepspeed.git_version_info"].version = "0.19.6"  # type: ignore[attr-defined]
    sys.modules["deepspeed.utils"] = types.ModuleType("deepspeed.utils")
    sys.modules["deepspeed.utils"].logger = logging.getLogger("quiet")  # type: ignore[attr-defined]
    for name in ("constants", "config", "elasticity"):
        spec = importlib.util.spec_from_file_location(f"deepspeed.elasticity.{name}", folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def main(folder: str) -> None:
    theirs = load(Path(folder))
    rows = []
    for question in questions():
        try:
            answer = theirs.compute_elastic_config({"elasticity": question["section"]}, "0.19.6", question["world"])
            row = {"answer": json.loads(json.dumps(answer, default=int))}
        except Exception as error:
            row = {"error": type(error).__name__}
        rows.append({**question, **row})
    ANSWERS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1])
