"""Which messages launchers of several hosts accept from one another, and copies that are complete or absent."""

from __future__ import annotations

import json
import socket
import threading
import time
from multiprocessing import AuthenticationError, Pipe
from pathlib import Path
from unittest import mock

import pytest

from hf_zero.extras.resilience import peers
from hf_zero.extras.resilience.peers import receive, send
from hf_zero.extras.resilience.restarts import TOKEN
from hf_zero.launch.command_line import main

SIZE = 10_000_000


def kept(folder: Path, step: int) -> Path:
    """A slot as a host's only rank keeps it."""
    slot = folder / "training-1" / "0"
    (slot / "global_step").mkdir(parents=True, exist_ok=True)
    (slot / "rank-0.0").write_bytes(bytes([step]) * SIZE)
    (slot / "rank-0.1").write_bytes(bytes(SIZE))  # frozen
    (slot / "global_step" / "states.pt").write_text(str(step))
    (slot.parent / "log_history.jsonl").write_text("{}\n" * step)
    (slot / "rank-0.json").write_text(json.dumps({"step": step, "beside": 1}))
    return slot


def sent(folder: Path, slot: Path, target: Path, known: dict[str, bytes]) -> bool:
    """Whether the copy is valid."""
    ours, theirs = Pipe()
    thread = threading.Thread(target=receive, args=(theirs, target))
    thread.start()
    is_whole = send(ours, folder, slot, known)
    thread.join()
    return is_whole


def test_a_copy_is_what_was_kept_and_only_changes_travel(tmp_path: Path) -> None:
    known: dict[str, bytes] = {}
    for step in (1, 2):
        slot = kept(tmp_path / "a", step)
        with mock.patch.object(peers, "_say", wraps=peers._say) as say:
            assert sent(tmp_path / "a", slot, tmp_path / "b", known)
        chunks = sum("at" in call.args[1] for call in say.call_args_list)
        copy = tmp_path / "b" / "training-1" / "0"
        for path in (path for path in slot.glob("**/*") if path.is_file()):
            assert (copy / path.relative_to(slot)).read_bytes() == path.read_bytes()
        assert (copy / "log_history.jsonl").read_text() == "{}\n" * step
        assert chunks == (8 if step == 1 else 5)  # of 4 MiB: 3 and 3 of values, and one each of two small files


def test_a_slot_that_changes_while_it_is_sent_is_not_taken(tmp_path: Path) -> None:
    """Its ranks have begun to keep the next update in it: the copy has no mark, so nobody resumes from it."""
    slot, real = kept(tmp_path / "a", 1), peers._say

    def say(link: object, message: dict[str, object]) -> None:
        if "file" in message:
            (slot / "rank-0.json").unlink(missing_ok=True)
        real(link, message)  # type: ignore[arg-type]

    with mock.patch.object(peers, "_say", say):
        assert not sent(tmp_path / "a", slot, tmp_path / "b", {})
    assert not list(tmp_path.glob("b/**/rank-0.json"))


@pytest.mark.parametrize(
    "messages",
    [
        [{"slot": "../training-1/0"}],
        [{"slot": "training-1/0"}, {"file": "../../x", "bytes": 1}],
        [{"slot": "training-1/0"}, {"file": "/x", "bytes": 1}],
        [{"slot": "training-1/0"}, {"marks": {"../rank-0.json": ""}}],
    ],
)
def test_nothing_is_written_elsewhere(messages: list[dict[str, object]], tmp_path: Path) -> None:
    ours, theirs = Pipe()
    for message in messages:
        ours.send_bytes(json.dumps(message).encode())
    with pytest.raises(ValueError, match="/"):
        receive(theirs, tmp_path / "b")
    assert not [path for path in tmp_path.glob("**/*") if path.is_file()]


@pytest.mark.parametrize(("token", "is_known"), [("right", True), ("wrong", False)])
def test_both_sides_know_the_token(token: str, is_known: bool) -> None:
    heard: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            end, _ = server.accept()
            try:
                heard.append(peers._heard(peers._proven(end, b"right", serves=True)))
            except AuthenticationError:
                heard.append("refused")

        thread = threading.Thread(target=serve)
        thread.start()
        place = server.getsockname()
        if is_known:
            peers._open(place, token.encode(), {"want": "fetch", "host": 1}).close()
        else:
            with pytest.raises((AuthenticationError, EOFError, ConnectionResetError)):
                peers._open(place, token.encode(), {"want": "fetch", "host": 1})
        thread.join()
    assert heard == [{"want": "fetch", "host": 1} if is_known else "refused"]


class Link:
    """A host as the leader sees it; `break_off` disconnects it."""

    def __init__(self, lead: peers._Lead, host: int | None, address: str) -> None:
        self._end, theirs = Pipe()
        hello = {"host": host, "is_spare": host is None}
        threading.Thread(target=lead.follow, args=(hello, theirs, address), daemon=True).start()

    def await_word(self, say: str) -> dict[str, object]:
        """The next message of this kind."""
        while self._end.poll(10):
            message = json.loads(self._end.recv_bytes())
            if message["say"] == say:
                return dict(message)
        raise AssertionError(f"nobody says {say}")

    def say(self, say: str, host: int) -> None:
        self._end.send_bytes(json.dumps({"say": say, "host": host, "restarts": 0}).encode())

    def break_off(self) -> None:
        self._end.close()


def test_the_next_living_spare_takes_the_place_of_a_lost_host() -> None:
    """A spare that is not needed is told of the job's end."""
    lead = peers._Lead(["a", "b"], "127.0.0.1")
    first, second = Link(lead, 0, "10.0.0.1"), Link(lead, 1, "10.0.0.2")
    first.await_word("hosts")
    dead, spare, idle = (Link(lead, None, f"10.0.0.{number}") for number in (3, 4, 5))
    while len(lead._spares) < 3:
        time.sleep(0.001)
    lead._spares.sort(key=lambda each: each[1])
    for host, link in enumerate((first, second)):
        link.say("ready", host)
    first.await_word("start")
    dead.break_off()
    second.break_off()
    assert first.await_word("end")["failure"]["host"] == "b"  # type: ignore[index]
    assert spare.await_word("take") == {"say": "take", "host": 1}
    while first.await_word("hosts")["addresses"] != {"0": "10.0.0.1", "1": "10.0.0.4"}:
        pass
    for say, then in (("ready", "start"), ("done", "over")):
        for host, link in enumerate((first, spare)):
            link.say(say, host)
        first.await_word(then)
    idle.await_word("over")


def test_a_token_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    words = ["--no_ssh", "--node_rank", "1", "--hostfile", str(tmp_path / "hosts"), "--max_restarts", "3", "x.py"]
    assert main(words) == 2
    assert "openssl rand -hex 16" in capsys.readouterr().err
