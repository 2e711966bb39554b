"""The handler's own duties that a running server does not show: unpacking, refusing to start, whose describe it is."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from handler.gr00t_handler import Gr00tHandler, unpack
from handler.wave import Slot
from handler.wire import Part, ReplyForm, Request


def raw(parameters: list[tuple[str, str, bytes]], headers: dict[bytes, bytes] | None = None) -> dict[str, Any]:
    """One request of a batch as TorchServe's protocol reader leaves it."""
    return {
        "requestId": bytearray(b"id-1"),
        "headers": [{"name": bytearray(k), "value": bytearray(v)} for k, v in (headers or {}).items()],
        "parameters": [{"name": n, "contentType": c, "value": bytearray(v)} for n, c, v in parameters],
    }


def test_unpack_keeps_every_part_and_keeps_parts_apart_from_headers() -> None:
    parts = [("video.front", "image/png", b"1"), ("video.front", "image/png", b"2"), ("Accept", "", b"3")]
    batch = [raw(parts, {b"Accept": b"application/json", b"X-Odd": b"\xff\xfe"}), raw([("body", "", b"x")])]
    processors, requests, ids = unpack(batch)
    assert requests[0].parts == [Part("video.front", "image/png", b"1"), Part("video.front", "image/png", b"2"),
                                 Part("Accept", "", b"3")]  # fmt: skip
    assert requests[0].headers == {"Accept": "application/json", "X-Odd": "\ufffd\ufffd"}
    assert requests[1].parts == [Part("body", "", b"x")]
    assert ids == {0: "id-1", 1: "id-1"}
    assert len(processors) == 2 and processors[0] is not processors[1]


def test_inputs_of_a_grpc_call_stand_for_headers() -> None:
    """Only where no header says what the body is, and only short ones; a form's parts stay parts."""
    inputs = [("content-type", "", b"application/json"), ("accept", "", b"a" * 1025), ("body", "", b"{}")]
    _, (call, form, over_http), _ = unpack([
        raw(inputs),
        raw([("content-type", "", b"text/plain")], {b"Content-Type": b"multipart/form-data; boundary=x"}),
        raw([("body", "", b"x")], {b"X-A": b"1"}),
    ])
    assert call.headers == {"content-type": "application/json"}
    assert call.parts == [Part("accept", "", b"a" * 1025), Part("body", "", b"{}")]
    assert form.parts == [Part("content-type", "", b"text/plain")] and list(form.headers) == ["Content-Type"]
    assert (over_http.headers, over_http.parts) == ({"X-A": "1"}, [Part("body", "", b"x")])


def context(checkpoint: Path, batch_size: int, handler: dict[str, Any]) -> Any:
    settings = {"checkpoint": str(checkpoint), "dtype": "auto", "engine": "auto", "reproducible": False} | handler
    config = {"batchSize": 8, "handler": settings}
    properties = {"batch_size": batch_size, "model_dir": "/nowhere", "gpu_id": None}
    return SimpleNamespace(model_yaml_config=config, system_properties=properties)


def test_another_batch_size_than_configured_is_refused_and_both_are_said(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match=r"batchSize 8.*batch size 4"):
        Gr00tHandler().initialize(context(checkpoint, 4, {}))
    assert [record.message.split(":")[0] for record in caplog.records] == ["GR00T_START_FAILED"]
    assert "batchSize 8" in caplog.text and "batch size 4" in caplog.text


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        ({"embodiment_tag": "no_such_robot"}, "no_such_robot"),
        ({"tokenizer": "/nowhere"}, "the tokenizer folder has no tokenizer.json"),
        ({"checkpoint": "/nowhere"}, "does not exist"),
    ],
)
def test_what_keeps_it_from_serving_is_one_line_in_the_log(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, handler: dict[str, Any], words: str
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match=words):
        Gr00tHandler().initialize(context(checkpoint, 8, handler))
    failures = [record.message for record in caplog.records if record.message.startswith("GR00T_START_FAILED: ")]
    assert len(failures) == 1 and words in failures[0]


BODY = [Part("body", "", b"x")]


@pytest.mark.parametrize(
    ("requests", "is_describe"),
    [
        ([Request({"describe": "True"}, [])], True),
        ([Request({"describe": "True", "Accept": "*/*"}, [])], True),
        ([Request({"describe": "True"}, BODY)], False),
        ([Request({"describe": "True"}, []), Request({}, BODY)], False),
        ([Request({"describe": "True", "content-type": "Multipart/Form-Data; boundary=x"}, [])], False),
        ([Request({"describe": "True", "Content-Type": "application/x-www-form-urlencoded"}, [])], False),
        ([Request({"describe": "False"}, [])], False),
        ([Request({}, [])], False),
    ],
)
def test_only_the_management_api_s_lone_job_is_a_describe(requests: list[Request], is_describe: bool) -> None:
    assert Gr00tHandler._is_describe_job(requests) is is_describe


def test_a_reply_that_cannot_be_written_costs_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a defect here must not fail the wave."""
    handler = Gr00tHandler()
    statuses: dict[int, int] = {}
    handler.context = SimpleNamespace(
        set_response_status=lambda code, phrase, idx: statuses.__setitem__(idx, code),
        set_response_content_type=lambda idx, value: None,
        set_response_header=lambda idx, key, value: None,
    )
    handler.policy = SimpleNamespace(checkpoint="0" * 12)  # type: ignore[assignment]
    from handler.problem import Problem

    form = ReplyForm("application/json", "openpi")
    bodies = handler.postprocess([Slot(form), Slot(form, problem=Problem(422, "its own"))])  # slot 0 has no rows
    assert statuses == {0: 500, 1: 422}
    assert b"could not be written" in bodies[0] and b"its own" in bodies[1]
