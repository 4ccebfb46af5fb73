"""The hook at interpreter startup: which package is `deepspeed`, the hook's cost, and that it is harmless."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.sites import Site

WHO = """
    import importlib.metadata, importlib.util
    spec = importlib.util.find_spec("deepspeed")
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        version = None
    answer = [spec and ("hf_zero" if "hf_zero" in spec.origin else "real"), version]
"""
OURS, REAL, NOBODY = ["hf_zero", "0.19.8+hf.zero"], ["real", "0.17.5"], [None, None]


@pytest.mark.parametrize(("switch", "who"), [(None, OURS), ("1", OURS), ("0", NOBODY), ("", OURS)])
def test_who_answers_where_no_deepspeed_is_installed(bare: Site, switch: str | None, who: list[str | None]) -> None:
    assert bare.ask(WHO, **({} if switch is None else {"HF_ZERO": switch})) == who


@pytest.mark.parametrize(("switch", "who"), [(None, REAL), ("1", OURS), ("0", REAL), ("perhaps", REAL)])
def test_a_real_deepspeed_is_left_alone_unless_asked(beside_real: Site, switch: str | None, who: list[str]) -> None:
    assert beside_real.ask(WHO, **({} if switch is None else {"HF_ZERO": switch})) == who


def test_importing_hf_zero_does_not_take_the_name_from_a_real_deepspeed(beside_real: Site) -> None:
    code = """
        import importlib.metadata, hf_zero, deepspeed
        names = [dist.metadata["Name"] for dist in importlib.metadata.distributions()]
        answer = [deepspeed.REAL, names.count("deepspeed")]
    """
    assert beside_real.ask(code) == [True, 1]


SAYS = "hf_zero: a real DeepSpeed (of unknown version) is installed too and answers to `import deepspeed`"


def test_who_steps_aside_says_so_once(beside_real: Site) -> None:
    """A framework's requirements had installed a real DeepSpeed. The job trained with it, and hf_zero, which had been
    installed for the job, gave no message."""
    silent = "import importlib.util, hf_zero; importlib.util.find_spec('deepspeed')"
    assert beside_real.run(silent).stderr == ""
    imports = "import deepspeed, importlib; importlib.import_module('deepspeed')"
    assert beside_real.run(imports).stderr.count(SAYS) == 1
    for variables in ({"RANK": "1"}, {"HF_ZERO": "0"}, {"HF_ZERO": "1"}):
        done = beside_real.run("import deepspeed", **variables)
        assert (done.returncode, done.stderr) == (0, "")


def test_install_takes_the_name(beside_real: Site) -> None:
    code = "import hf_zero; hf_zero.install(); import deepspeed\n" + "answer = deepspeed.__version__"
    assert beside_real.ask(code) == OURS[1]


def test_install_after_a_real_import_is_refused(beside_real: Site) -> None:
    done = beside_real.run("import deepspeed, hf_zero; hf_zero.install()")
    assert done.returncode != 0
    assert "RuntimeError: hf_zero.install() came too late: a real deepspeed was already imported from" in done.stderr


def test_install_against_the_switch_is_refused(bare: Site) -> None:
    done = bare.run("import hf_zero; hf_zero.install()", HF_ZERO="0")
    assert "RuntimeError: hf_zero.install() was called, but HF_ZERO=0 turns hf_zero off" in done.stderr


def test_a_plain_folder_called_deepspeed_does_not_hide_us(bare: Site, tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "zero2.json").write_text("{}", encoding="utf-8")
    (tmp_path / "train.py").write_text("import deepspeed; print(deepspeed.__version__)", encoding="utf-8")
    done = bare.run_args(str(tmp_path / "train.py"), cwd=tmp_path)
    assert done.stdout.strip() == OURS[1], done.stderr


def test_a_script_folder_with_its_own_deepspeed_package_wins(bare: Site, tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("mine = 1", encoding="utf-8")
    (tmp_path / "train.py").write_text("import deepspeed; print(deepspeed.mine)", encoding="utf-8")
    done = bare.run_args(str(tmp_path / "train.py"), cwd=tmp_path)
    assert done.stdout.strip() == "1", done.stderr


def test_importing_hf_zero_is_enough_where_the_hook_file_is_not_processed(bare: Site) -> None:
    # -S skips site and so every .pth file, as in a zip application or with a plain PYTHONPATH.
    code = f"""
import sys; sys.path.append({str(bare.packages)!r})
import hf_zero, deepspeed
print(deepspeed.__version__, sum(type(finder).__name__ == "AliasFinder" for finder in sys.meta_path))
"""
    done = bare.run_args("-I", "-S", "-c", code)
    assert done.stdout.split() == [OURS[1], "1"], done.stderr


def test_children_of_a_process_find_us_too(bare: Site) -> None:
    code = """
        import subprocess, sys
        child = [sys.executable, "-c", "import deepspeed; print(deepspeed.__version__)"]
        answer = subprocess.check_output(child, text=True)
    """
    assert bare.ask(code).strip() == OURS[1]


def test_interpreter_start_loads_three_small_modules_only(wheel: Path, tmp_path: Path) -> None:
    modules = "import sys; answer = sorted(sys.modules)"
    before = Site.empty(tmp_path / "site")
    without = before.ask(modules)
    with_hook = before.unpack(wheel).ask(modules)
    own = {"hf_zero", "hf_zero.integration", "hf_zero.integration.startup"}
    assert set(with_hook) - set(without) - {"__future__"} == own


# Runs before hf_zero's hook (.pth files are sorted by name) and records events that must not occur at import time.
WATCHER = (
    "import sys; sys.noted = []; sys.addaudithook(lambda event, args: sys.noted.append(event) if event.startswith("
    "('subprocess.', 'os.system', 'os.exec', 'os.fork', 'os.posix_spawn', 'os.spawn', 'pty.', 'socket.', 'ctypes.')) "
    "else None)\n"
)


def test_neither_the_hook_nor_the_alias_starts_a_process_or_opens_a_socket(wheel: Path, tmp_path: Path) -> None:
    site = Site.empty(tmp_path / "site").unpack(wheel)
    (site.packages / "aaa_watcher.pth").write_text(WATCHER, encoding="utf-8")
    code = """
        import sys, hf_zero, deepspeed, deepspeed.zero, deepspeed.runtime.engine, deepspeed.launcher.runner
        import importlib.metadata
        importlib.metadata.version("deepspeed")
        answer = [sys.noted, "torch" in sys.modules]
    """
    assert site.ask(code) == [[], False]


def test_the_watcher_watches(wheel: Path, tmp_path: Path) -> None:
    site = Site.empty(tmp_path / "site").unpack(wheel)
    (site.packages / "aaa_watcher.pth").write_text(WATCHER, encoding="utf-8")
    code = """
        import subprocess, sys
        subprocess.run([sys.executable, "-c", ""])
        answer = "subprocess.Popen" in sys.noted
    """
    assert site.ask(code) is True


@pytest.mark.parametrize("damage", ["removed", "syntax error", "raises"])
def test_a_damaged_package_breaks_no_interpreter(wheel: Path, tmp_path: Path, damage: str) -> None:
    site = Site.empty(tmp_path / "site").unpack(wheel)
    startup = site.packages / "hf_zero" / "integration" / "startup.py"
    if damage == "removed":
        (site.packages / "hf_zero").rename(tmp_path / "gone")
    else:
        startup.write_text("def" if damage == "syntax error" else "raise KeyError('x')", encoding="utf-8")
    done = site.run("print('alive')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def test_the_hook_is_silent_under_warnings_as_errors(bare: Site) -> None:
    done = bare.run_args("-I", "-W", "error", "-X", "dev", "-c", "import deepspeed")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_finder_that_passes_questions_on_is_no_real_deepspeed(bare: Site) -> None:
    """A tracing tool's finder queried every other finder in turn. hf_zero's own answer came back through it and was
    mistaken for a real DeepSpeed, so that neither was found by accelerate.
    """
    code = """
        import importlib.metadata, importlib.util, sys

        class Tracer:
            asking = False
            def find_spec(self, name, path=None, target=None):
                if self.asking or name.partition(".")[0] != "deepspeed":
                    return None
                self.asking = True
                try:
                    return importlib.util.find_spec(name)
                finally:
                    self.asking = False

        class Walker:
            def find_spec(self, name, path=None, target=None):
                for finder in sys.meta_path:
                    spec = None if finder is self or isinstance(finder, Tracer) else finder.find_spec(name, path)
                    if spec is not None:
                        return spec

        sys.meta_path.insert(0, Tracer())
        sys.meta_path.append(Walker())
        import deepspeed
        answer = [deepspeed.__version__, importlib.metadata.version("deepspeed")]
    """
    assert bare.ask(code) == [OURS[1], OURS[1]]
