"""Started by accelerate's launcher: each rank prints a JSON line with its settings and its engine."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from deepspeed.utils import get_z3_leaf_modules
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def content(folder: str | None) -> int:
    """The number of files under a folder."""
    return sum(path.is_file() for path in Path(folder).rglob("*")) if folder and Path(folder).exists() else 0


accelerator = Accelerator()
plugin = accelerator.deepspeed_plugin
model = nn.Sequential(Block(), Block(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.ones(32, 8), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(batch.to(next(model.parameters()).dtype)).float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
zero = plugin.deepspeed_config["zero_optimization"]
report = {
    "rank": accelerator.process_index,
    "ranks": accelerator.num_processes,
    "batches": len(loader),
    "device": accelerator.device.type,
    "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
    "type": str(accelerator.distributed_type.value),
    "HF_ZERO": os.environ.get("HF_ZERO"),
    "engine": type(model).__module__,
    "precision": str(next(model.parameters()).dtype).removeprefix("torch."),
    "stage": model.zero_optimization_stage(),
    "accumulation": model.gradient_accumulation_steps(),
    "clipping": model.gradient_clipping(),
    "saves_16bit": model.zero_gather_16bit_weights_on_model_save(),
    "zero_init": plugin.zero3_init_flag,
    "leaves": sorted({type(module).__name__ for module in get_z3_leaf_modules(model.module)}),
    "optimizer_device": zero["offload_optimizer"]["device"],
    "parameter_device": zero["offload_param"]["device"],
    "optimizer_path": zero["offload_optimizer"].get("nvme_path"),
    "parameter_path": zero["offload_param"].get("nvme_path"),
    "files_of_optimizer": content(zero["offload_optimizer"].get("nvme_path")),
    "files_of_parameters": content(zero["offload_param"].get("nvme_path")),
    "threads": os.environ.get("OMP_NUM_THREADS"),
    "debug": os.environ.get("ACCELERATE_DEBUG_MODE"),
    "updates": model.global_steps,
    "arguments": sys.argv[1:],
}
print("\nREPORT " + json.dumps(report), flush=True)
