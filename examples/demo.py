"""A complete run in a few minutes: trains a small language model with ZeRO-2, plots its loss and generates code."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table

from hf_zero.launch.children import run

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "train_clm.py"
CONFIGS = {"bf16": ROOT / "configs" / "zero2_bf16.json", "fp32": ROOT / "configs" / "zero2.json"}

# A size that two CPU cores can train usefully in four minutes.
MODEL = {"vocab_size": 4096, "hidden_size": 512, "num_layers": 2, "num_heads": 8}
DATA = {"block_size": 128, "max_eval_samples": 128}
SEQUENCES_PER_STEP = 8
MIN_STEPS, MAX_STEPS = 200, 800
SECONDS = 200.0  # of training on CPUs, about
PROMPT = "class FileReader:\n    def __init__(self, path):"
# bf16 has 8 significant bits: summing the same loss in another order changes the third digit, other weights the first.
LOSS_TOLERANCE = 0.02


@dataclass(frozen=True)
class Machine:
    """Number of training processes on this machine, their device and their precision."""

    num_processes: int
    device: str
    precision: str = "bf16"

    @classmethod
    def detect(cls) -> Machine:
        import torch  # not at the top, to keep `--help` fast

        num_gpus = torch.cuda.device_count()
        return cls(num_gpus, "cuda") if num_gpus else cls(2, "cpu", "bf16" if multiplies_bf16() else "fp32")

    @property
    def label(self) -> str:
        kind = "GPU" if self.device == "cuda" else "CPU"
        return f"{self.num_processes} {kind} process{'es' if self.num_processes > 1 else ''}"


def multiplies_bf16() -> bool:
    """Whether this processor multiplies in bf16 natively; emulation is a hundred times slower."""
    return seconds_of_products("bfloat16") < 4 * seconds_of_products("float32")


PRODUCTS_FLOPS = 3 * 2 * 128 * 512 * 512


def seconds_of_products(dtype: str) -> float:
    """CPU time of a layer's three products on one thread.

    CPU flags do not show which operations PyTorch accelerates, and on a busy machine threads wait for each other.
    """
    import torch

    inputs = torch.ones(128, 512, dtype=getattr(torch, dtype))
    weight = torch.ones(512, 512, dtype=inputs.dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = float("inf")
        for _ in range(3):
            started = time.thread_time()
            outputs = torch.nn.functional.linear(inputs, weight)
            outputs @ weight, outputs.T @ inputs
            best = min(best, time.thread_time() - started)
        return best
    finally:
        torch.set_num_threads(threads)


def steps_for(machine: Machine) -> int:
    """As many updates as take about `SECONDS` here. The schedule of the learning rate needs their number beforehand."""
    if machine.device != "cpu":
        return MAX_STEPS
    dtype = "bfloat16" if machine.precision == "bf16" else "float32"
    hidden = MODEL["hidden_size"]
    matrices = MODEL["num_layers"] * 12 * hidden**2 + MODEL["vocab_size"] * hidden
    tokens = SEQUENCES_PER_STEP // machine.num_processes * DATA["block_size"]
    threads = max(1, (os.cpu_count() or 1) // machine.num_processes)
    products = 6 * matrices * tokens / PRODUCTS_FLOPS * seconds_of_products(dtype) / threads
    return min(
        MAX_STEPS, max(MIN_STEPS, int(SECONDS / (1.25 * products)) // 10 * 10)
    )  # the rest takes a fifth of a step


def flags(values: dict[str, int]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def training_command(machine: Machine, steps: int, output: Path) -> list[str]:
    """The command that a user would type, on a free port; in the script's flags only `--deepspeed` relates to ZeRO."""
    per_process = max(1, SEQUENCES_PER_STEP // machine.num_processes)
    command = [sys.executable, "-m", "hf_zero", "launch", "--num_gpus", str(machine.num_processes)]
    command += ["--master_port", str(free_port()), str(SCRIPT)]
    command += ["--deepspeed", str(CONFIGS[machine.precision]), *(["--use_cpu"] if machine.device == "cpu" else [])]
    command += ["--bf16"] if machine.precision == "bf16" else []
    command += ["--do_train", "--do_eval", "--output_dir", str(output), "--max_steps", str(steps)]
    command += [*flags(MODEL), *flags(DATA)]
    command += ["--per_device_train_batch_size", str(per_process), "--per_device_eval_batch_size", "8"]
    command += [
        "--learning_rate",
        "1.5e-3",
        "--lr_scheduler_type",
        "linear",
        "--warmup_steps",
        str(max(1, steps // 10)),
    ]
    command += ["--weight_decay", "0.1", "--adam_beta2", "0.95", "--max_grad_norm", "1.0"]
    command += ["--logging_steps", str(max(1, steps // 30)), "--logging_first_step"]
    command += ["--eval_strategy", "steps", "--eval_steps", str(max(1, steps // 4)), "--eval_on_start"]
    return [*command, "--save_strategy", "no", "--report_to", "none"]


def free_port() -> int:
    """A port that no other job on this machine uses, such as another demo."""
    with socket.socket() as server:
        server.bind(("", 0))
        return int(server.getsockname()[1])


def quiet_environment(machine: Machine) -> dict[str, str]:
    """No network access, no thread warnings, one progress bar; variables that the user has set are kept."""
    threads = max(1, (os.cpu_count() or 1) // machine.num_processes)
    wishes = {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if not sys.stderr.isatty():
        wishes["TQDM_MININTERVAL"] = "15"  # in a log file every update of the bar is a new line
    return {**wishes, **os.environ}


def train(machine: Machine, steps: int, output: Path) -> None:
    """Runs the training in separate processes, which end with this one; exits with its status if it fails."""
    command = training_command(machine, steps, output)
    try:
        status = run(command, cwd=ROOT, env=quiet_environment(machine))
    except SystemExit as ended:
        name = signal.Signals(int(ended.code or 0) - 128).name
        print(f"\nthe demo was ended by {name}, with its training processes", file=sys.stderr, flush=True)
        raise
    if status:
        sys.exit(status)


def show_results(console: Console, machine: Machine, output: Path) -> bool:
    """Loads the saved model and prints a report. Returns whether its loss matches the trained model's."""
    os.environ.update(quiet_environment(machine))
    import torch
    import transformers
    from demo_report import History, draw_loss_curve, load_back, mean_loss, write_code
    from train_clm import DataArguments, ModelArguments, load_blocks, load_text, load_tokenizer

    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # enough for this model; more threads are slow while other programs use the cores
    history = History.read(output)
    model, tokenizer = load_back(output, machine.device)
    size = f"{model.num_parameters() / 1e6:.1f}M parameters"

    curve = output / "loss.png"
    draw_loss_curve(history, MODEL["vocab_size"], f"{size}, ZeRO-2, {machine.precision}, {machine.label}", curve)
    data_args = DataArguments(block_size=DATA["block_size"], max_eval_samples=DATA["max_eval_samples"])
    documents = load_text(data_args)
    # The blocks that Trainer used, from the cache; only the model comes from the saved files.
    own_tokenizer = load_tokenizer(ModelArguments(vocab_size=MODEL["vocab_size"]), data_args, documents["train"])
    reloaded = mean_loss(model, load_blocks(data_args, documents, own_tokenizer)["validation"])
    same = abs(reloaded - history.final_held_out_loss) <= LOSS_TOLERANCE

    sample = write_code(model, tokenizer, PROMPT, num_tokens=140)
    (output / "sample.py.txt").write_text(sample)
    code = Syntax(sample, "python", word_wrap=True, background_color="default")
    console.print(Panel(code, title="what the saved model writes", expand=False))

    per_process = max(1, SEQUENCES_PER_STEP // machine.num_processes)
    num_tokens = history.num_steps * per_process * machine.num_processes * DATA["block_size"]
    fall = 1 - history.last_loss / history.first_loss
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("model", f"Llama-style, {size}, vocabulary {len(tokenizer)}")
    table.add_row(
        "trained", f"{history.num_steps} steps, {num_tokens:,} tokens, {machine.label}, ZeRO-2, {machine.precision}"
    )
    table.add_row("speed", f"{num_tokens / history.train_seconds:,.0f} tokens/s")
    table.add_row("training loss", f"{history.first_loss:.2f} -> {history.last_loss:.2f} ({-fall:.0%})")
    verdict = "[green]the same[/green]" if same else "[bold red]NOT the same[/bold red]"
    table.add_row("held-out loss", f"{history.final_held_out_loss:.3f}; loaded back {reloaded:.3f}, {verdict}")
    table.add_row("loss curve", str(curve))
    table.add_row("model folder", str(output))
    console.print(table)
    return same


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    steps = f"training steps (default: what trains in about {SECONDS / 60:.0f} minutes, {MIN_STEPS} to {MAX_STEPS})"
    parser.add_argument("--steps", type=int, help=steps)
    parser.add_argument("--output", type=Path, default=ROOT / "out" / "demo", help="folder, replaced if it exists")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 2:
        parser.error(f"--steps {options.steps}: at least 2 are needed to see the loss move")
    return options


def main() -> None:
    options = parse()
    started = time.monotonic()
    console = Console()
    machine = Machine.detect()
    output = options.output.resolve()
    # Only replace a folder that an earlier demo created; any other folder of that name is the user's.
    if (output / "trainer_state.json").exists():
        shutil.rmtree(output)
    setting = f"{machine.label}, ZeRO-2, {machine.precision}"
    console.print(f"[bold]hf_zero demo[/bold]: the standard library's sources, {setting}", highlight=False)
    if machine.precision == "fp32":
        console.print("fp32, because this processor only emulates products in bf16", highlight=False)
    steps = options.steps or steps_for(machine)
    console.print(f"1/2 training {steps} steps with an unmodified Hugging Face Trainer", highlight=False)
    train(machine, steps, output)
    console.print("2/2 loading the saved model back", highlight=False)
    same = show_results(console, machine, output)
    console.print(f"all done in {(time.monotonic() - started) / 60:.1f} minutes", highlight=False)
    if not same:
        sys.exit("the saved model does not reproduce the loss that the Trainer reported: please report this as a bug")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nthe demo was interrupted")
