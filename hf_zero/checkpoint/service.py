"""The engine's calls to save a checkpoint under a tag, and to load one. Both are collective."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_zero.checkpoint.arena import Arena, described
from hf_zero.checkpoint.background import BackgroundSave, Snapshot, num_bytes_of
from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.deepspeed.folder import Folder, list_files, tag_in_latest
from hf_zero.checkpoint.deepspeed.states import RunState
from hf_zero.checkpoint.files.stream import write_records
from hf_zero.checkpoint.files.torch_file import IN_PIECES, WriteRecords, write_torch_file
from hf_zero.checkpoint.load import LoadPlan, apply, plan_load
from hf_zero.checkpoint.opening import check_together, name_alternative, together, view_of_part
from hf_zero.checkpoint.save import files_of, model_files_of
from hf_zero.checkpoint.subject import ModelSubject, Subject
from hf_zero.checkpoint.tensor_ranks import cuts_of, in_parts, mixed_cuts_of
from hf_zero.checkpoint.transaction import Destination, holds_states, leftovers, tag_folders, write_checkpoint
from hf_zero.checkpoint.view import CheckpointView
from hf_zero.comm import Collectives, background_collectives, enter, get_local_rank, hosts, ledger
from hf_zero.config.schema.checkpoint import Checkpoint, OurCheckpoints
from hf_zero.device.host_memory import host_available
from hf_zero.errors import CheckpointError, WrongArgument
from hf_zero.log import logger
from hf_zero.params.store import of

Directory = str | os.PathLike[str]
_TAKEN = (ds.LATEST, ds.LATEST_UNIVERSAL, "zero_to_fp32.py")


@dataclass(frozen=True, slots=True)
class SaveRequest:
    directory: Directory
    tag: str
    save_latest: bool = True
    exclude_frozen: bool = False


@dataclass(frozen=True, slots=True)
class LoadRequest:
    directory: Directory
    tag: str | None = None
    strict: bool = True
    optimizer: bool = True


def save_checkpoint(subject: ModelSubject, run: RunState, request: SaveRequest, background: BackgroundSave) -> Path:
    """Write one checkpoint and return its folder. A failure on any rank is raised on all ranks.

    With `hf_zero.checkpoint.async` it returns when everything is copied to host memory, except what only the next
    update changes; the rest runs in the background during training (`background.py`).

    Raises:
        CheckpointError: if it could not be written; earlier checkpoints are unchanged.
    """
    root = _named_folder("save_checkpoint(save_dir", request.directory)
    background.wait()
    enter("save_checkpoint")
    collectives = subject.groups.world
    policy = subject.resolved.section(Checkpoint)
    tag = _common_tag(request.tag, policy, collectives)
    is_leader = get_local_rank() == 0 if policy.use_node_local_storage else collectives.rank == 0
    place = Destination(
        root=root,
        tag=tag,
        is_leader=is_leader,
        node=socket.gethostname() if policy.use_node_local_storage else "",
        save_latest=request.save_latest,
        adds_script=subject.stage > 0,
    )
    with ledger.phase("checkpoint"):
        _check_drives(subject)
        snapshot = None
        if getattr(subject.resolved.section(OurCheckpoints), "async"):  # `async` is a keyword
            updater = subject.assembly.optimizer.updater if isinstance(subject, Subject) else None
            snapshot = Snapshot(background.arena, updater)
        files = together(lambda: _files(subject, run, request, snapshot, is_leader=is_leader), collectives)
        if snapshot is not None and _has_room(background.arena, num_bytes_of(files), collectives):
            kept, beside = snapshot.keep(files), background_collectives()
            background.start(lambda: _write(place, kept, beside, background.arena.write_records), snapshot)
        else:
            _write(place, files, collectives)
    return place.final


def keep_checkpoint(
    subject: Subject,
    run: RunState,
    folder: Path,
    background: BackgroundSave,
    *,
    add: Callable[[], object],
    kept: Callable[[Sequence[str]], object],
) -> None:
    """Keep a checkpoint in host memory: the files of `save_checkpoint`, with values in the files of the save's arena.
    Returns when everything is copied except what the next update waits for. Collective.

    Args:
        folder: of the tag, in a tmpfs; the arena's files are next to it.
        add: adds the caller's own data.
        kept: called in the background with the names of this rank's files, when its part is complete.

    Raises:
        CheckpointError: on all ranks, if one has too little space.
    """
    background.wait()
    arena, collectives = background.arena, subject.groups.world

    def keep() -> dict[str, Any]:
        try:
            folder.mkdir(exist_ok=True)
            add()
            return {name: snapshot.keep(content) for name, content in files.items()}
        except OSError as error:
            raise CheckpointError(folder, f"cannot be kept in host memory: {error}") from error

    def describe() -> None:
        for name, content in contents.items():
            path = folder / name
            path.unlink(missing_ok=True)
            stated = {**content.get(ds.HF_ZERO, {}), ds.MANIFEST_KEY: False}  # no checksums here
            whole = {IN_PIECES: True, **described({**content, ds.HF_ZERO: stated}, arena)}
            if subject.stage == 3 and ds.MODULE in content:  # all hosts read rank 0's buffers
                whole[ds.MODULE] = content[ds.MODULE]
            write_torch_file(path, whole)
        kept(list(contents))

    with ledger.phase("checkpoint"):
        _check_drives(subject)
        snapshot = Snapshot(arena, subject.assembly.optimizer.updater, _lasting(subject.frozen().values()))
        groups = subject.groups
        # When training resumes, a host only reads its own files.
        leads = collectives.rank == hosts().beside(collectives.rank)[0]
        leads = groups.is_first_beside(per_host=True) if groups.model_size > 1 else leads
        files = files_of(subject, run, writes_shared_file=leads, exclude_trained=True, snapshot=snapshot)
        contents = together(keep, collectives)
        background.start(describe, snapshot)


def _lasting(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """This rank's parts of frozen parameters, unless they are created on each request."""
    for parameter in parameters:
        handle = of(parameter)
        first, second = (parameter, parameter) if handle is None else (handle.view(), handle.view())
        if first.data_ptr() == second.data_ptr():
            yield first


def _has_room(arena: Arena, num_bytes: int, collectives: Collectives) -> bool:
    """Whether every rank has enough host memory for a second copy of what it saves. Collective."""
    num_beside = len(hosts().beside(collectives.rank))
    has_room = max(0, num_bytes - arena.num_bytes) * num_beside <= host_available()
    if all(collectives.gather_objects(has_room)):
        return True
    logger.warning(
        "hf_zero.checkpoint.async: host memory is too small for a second copy of masters and optimizer states "
        "(%.1f GB a rank), so training waits until this checkpoint is written",
        num_bytes / 1e9,
    )
    return False


def _files(
    subject: ModelSubject, run: RunState, request: SaveRequest, snapshot: Snapshot | None, *, is_leader: bool
) -> dict[str, Any]:
    writes_shared = is_leader
    if subject.groups.model_size > 1:  # ranks with other parts of the weights have a separate shared file
        policy = subject.resolved.section(Checkpoint)
        writes_shared = subject.groups.is_first_beside(per_host=policy.use_node_local_storage)
    if isinstance(subject, Subject):
        return files_of(
            subject, run, writes_shared_file=writes_shared, exclude_frozen=request.exclude_frozen, snapshot=snapshot
        )
    return model_files_of(subject, run, writes_shared_file=writes_shared, exclude_frozen=request.exclude_frozen)


def _write(
    place: Destination, files: Mapping[str, Any], collectives: Collectives, write: WriteRecords = write_records
) -> None:
    write_checkpoint(place, files, collectives, write)
    logger.info("checkpoint %s is complete", place.final)


def _check_drives(subject: ModelSubject) -> None:
    """Raise StorageError on all ranks if a drive of one rank has failed."""
    if isinstance(subject, Subject) and subject.assembly.placements.drives:
        subject.assembly.optimizer.updater.stager.flush()
        subject.assembly.placements.check(subject.groups.world)


def _named_folder(call: str, folder: object) -> Path:
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise WrongArgument(f'{call}={folder!r}): give a folder; "." is the current directory')
    return Path(folder)


def _common_tag(tag: str, policy: Checkpoint, collectives: Collectives) -> str:
    tags = collectives.gather_objects(tag)
    if len(set(tags)) > 1:
        problem = f"ranks use different tags: {', '.join(map(repr, tags))}"
        if policy.tag_validation == "Fail":
            raise WrongArgument(
                f"save_checkpoint(tag=...): {problem} (checkpoint.tag_validation is Fail); give one tag"
            )
        if policy.tag_validation == "Warn":
            logger.warning("%s; that of rank 0 is used", problem)
    first = str(tags[0])
    if not first or first.startswith(("/", ".")) or ".." in first.split("/"):
        raise WrongArgument(f"save_checkpoint(tag={first!r}): a tag is the name of a folder inside save_dir")
    if first.split("/")[0] in _TAKEN:
        raise WrongArgument(
            f"save_checkpoint(tag={first!r}): this name is reserved for a file in save_dir; use another tag"
        )
    return first


def load_checkpoint(subject: ModelSubject, request: LoadRequest) -> CheckpointView | None:
    """Load a checkpoint of any stage, world size and writer; None (with a warning) if there is none.

    Raises:
        CheckpointError: on all ranks; names the file that is missing, damaged or does not fit. Nothing has changed.
    """
    collectives, root = subject.groups.world, _named_folder("load_checkpoint(load_dir", request.directory)
    enter("load_checkpoint")
    if collectives.rank == 0:
        for leftover in leftovers(root):
            logger.warning("%s is from an interrupted save; it is ignored and can be deleted", leftover)
    tag = request.tag
    if tag is None:
        tag = together(lambda: _latest(root, subject.resolved.section(Checkpoint)), collectives)
    if tag is None:
        together(lambda: _refuse_to_guess(root), collectives)
    if tag is None:
        logger.warning("%s has no file %r: nothing is loaded. Pass a tag to load without it.", root, ds.LATEST)
        return None
    with ledger.phase("checkpoint"):
        try:
            folders = together(lambda: list_files(root / str(tag), str(tag)), collectives)
            check_together(folders[0], collectives)
            plan = together(lambda: _plan(subject, folders, request), collectives)
        except CheckpointError as error:
            raise name_alternative(error, root, str(tag), collectives) from error
        apply(subject, plan)
        _check_drives(subject)
    logger.info("checkpoint %s (stage %d, %d ranks) is loaded", folders[0].path, plan.view.stage, plan.view.world)
    return plan.view


def _latest(root: Path, policy: Checkpoint) -> str | None:
    universal = root / ds.LATEST_UNIVERSAL
    if policy.load_universal and universal.is_file():
        return tag_in_latest(root, universal.name)
    return tag_in_latest(root)


def _refuse_to_guess(root: Path) -> None:
    """Reject a folder with checkpoints but without `latest`, which a new training would soon replace."""
    if not root.is_dir():
        return
    if holds_states(root):
        fix = f"pass its parent folder, with tag={root.resolve().name!r}"
        raise CheckpointError(root / ds.LATEST, "is missing: this is the folder of a single tag", fix)
    tags = [folder.name for folder in tag_folders(root)]
    if tags:
        problem = f"is missing, but this folder contains checkpoints: {', '.join(tags[:5])}"
        raise CheckpointError(root / ds.LATEST, problem, "pass one of them as tag, or write its name into this file")


def _plan(subject: ModelSubject, folders: Sequence[Folder], request: LoadRequest) -> LoadPlan:
    shapes = subject.group_shapes() if isinstance(subject, Subject) else None
    groups, wants_states = subject.groups, request.optimizer and isinstance(subject, Subject)
    part = groups.model_rank, groups.model_size
    view = view_of_part(folders, shapes, cuts_of(subject.module), part, with_optimizer=wants_states)
    mixed = mixed_cuts_of(subject.module)
    if mixed:
        _, place = groups.place_of(groups.world.ranks[groups.world.rank])
        view = in_parts(view, mixed, place, with_optimizer=wants_states)
    return plan_load(subject, view, strict=request.strict, with_optimizer=request.optimizer)


def scheduler_state(view: CheckpointView) -> Mapping[str, Any] | None:
    state = view.meta.get(ds.LR_SCHEDULER)
    return state if isinstance(state, Mapping) else None


def feature_states(view: CheckpointView) -> dict[str, Any]:
    """The saved states of training-time features, by their names."""
    others = view.meta.get(ds.TRAINING_FEATURES)
    states = dict(others) if isinstance(others, Mapping) else {}
    return {**states, **{key: view.meta.get(key) for key in (ds.DATA_SAMPLER, ds.RANDOM_LTD)}}


def run_counters(view: CheckpointView, samples_per_update: int) -> tuple[int, int, int]:
    """The numbers of updates, of skipped ones and of samples so far."""
    steps = int(view.meta.get(ds.GLOBAL_STEPS, 0))
    samples = int(view.meta.get(ds.GLOBAL_SAMPLES, steps * samples_per_update))
    return steps, int(view.meta.get(ds.SKIPPED_STEPS, 0)), samples
