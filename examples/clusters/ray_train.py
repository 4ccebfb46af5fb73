"""Train with Ray Train: examples/train_clm.py on every worker, restarted by Ray from the last checkpoint.

On this machine, with two workers of one CPU each:

    python examples/clusters/ray_train.py --num_workers 2 --storage /tmp/ray -- --do_train --use_cpu --bf16 \\
        --deepspeed configs/zero2_bf16.json --max_steps 100 --save_strategy steps --save_steps 25

On a cluster: `--address auto --use_gpu`, started in a folder that all machines share. The arguments after `--` are
those of train_clm.py. Ray Train creates the process group and sets RANK, LOCAL_RANK and WORLD_SIZE; hf_zero uses both
as they are.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

EXAMPLES = Path(__file__).resolve().parent.parent


def train_on_worker(settings: dict[str, Any]) -> None:
    """Runs one rank. Imports are local because Ray sends this function to machines that have not imported anything."""
    import train_clm
    from ray.train.huggingface.transformers import RayTrainReportCallback

    os.chdir(settings["folder"])  # Ray starts each worker in its own folder; relative paths mean this one
    model_args, data_args, training_args = train_clm.parse(settings["arguments"])
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        train_clm.run(model_args, data_args, training_args, callbacks=[RayTrainReportCallback()])
        return
    with checkpoint.as_directory() as folder:
        training_args.resume_from_checkpoint = os.path.join(folder, RayTrainReportCallback.CHECKPOINT_NAME)
        train_clm.run(model_args, data_args, training_args, callbacks=[RayTrainReportCallback()])


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Splits the command line into Ray's arguments and train_clm's."""
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_workers", type=int, default=2, help="Ranks.")
    parser.add_argument("--use_gpu", action="store_true", help="One GPU for each rank.")
    parser.add_argument("--address", default=None, help="Running Ray cluster (auto: local). Default: start one.")
    parser.add_argument("--storage", required=True, help="Folder that all machines share: checkpoints, Ray's state.")
    parser.add_argument("--name", default="train_clm", help="Name of the run. A known name resumes that run.")
    parser.add_argument("--max_failures", type=int, default=3, help="Restarts from the last checkpoint.")
    return parser.parse_args(words[:split]), words[split + 1 :]


def main(words: list[str]) -> dict[str, Any]:
    options, arguments = parse(words)
    storage = Path(options.storage).resolve()
    if not any(word.startswith("--output_dir") for word in arguments):
        arguments += ["--output_dir", str(storage / options.name / "output")]
    # Ray copies the examples to the other machines, which need hf_zero but no checkout.
    ray.init(address=options.address, runtime_env={"working_dir": str(EXAMPLES)})
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"arguments": arguments, "folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=options.num_workers, use_gpu=options.use_gpu),
        run_config=RunConfig(
            name=options.name,
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=options.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    print(f"last report: {result.metrics}")
    print(f"last checkpoint: {result.checkpoint and result.checkpoint.path}")
    return dict(result.metrics or {})


if __name__ == "__main__":
    main(sys.argv[1:])
