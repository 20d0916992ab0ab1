from __future__ import annotations

import json

import pytest
from checkpoints import make_manifest

from paddle_fsdp_ckpt.errors import CheckpointError, NewerFormatError, UnsafeCheckpointError
from paddle_fsdp_ckpt.storage.format import (
    FORMAT_VERSION,
    FileRecord,
    Manifest,
    check_json,
    parse_left_over,
    rank_file_name,
    replaced_name,
    staging_name,
)

RECORDS = [FileRecord(rank_file_name(0), 1000, 3), FileRecord(rank_file_name(1), 900, 2, ("ab12", "cd34"))]


@pytest.fixture
def manifest() -> Manifest:
    return make_manifest(RECORDS)


def test_a_manifest_comes_back_from_its_text_as_it_was(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_losses_that_are_not_finite_come_back() -> None:
    fields = json.loads(make_manifest(RECORDS).to_json())
    fields["extra_state"] = {"best": float("inf")}
    assert Manifest.from_json(json.dumps(fields)).extra_state == {"best": float("inf")}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1),
        ("step", 1.0),
        ("step", True),
        ("world_size", 3),
        ("world_size", "2"),
        ("created", "yesterday"),
        ("created", "2024-05-01T12:00:00+02:00"),
        ("created", "2024-05-01T12:00:00"),
        ("versions", ["3.3.1"]),
        ("versions", {"paddle": 3.3}),
        ("files", {}),
        ("files", [RECORDS[1].to_json(), RECORDS[0].to_json()]),
        ("files", [RECORDS[0].to_json(), RECORDS[0].to_json()]),
        ("files", [RECORDS[0].to_json(), {**RECORDS[1].to_json(), "size": -5}]),
        ("files", [RECORDS[0].to_json(), {**RECORDS[1].to_json(), "digests": "ab"}]),
        ("files", [RECORDS[0].to_json(), {**RECORDS[1].to_json(), "colour": "red"}]),
        ("files", [RECORDS[0].to_json(), {"name": "1_0.safetensors"}]),
        ("format_version", 0),
        ("format_version", "1"),
        ("format_version", None),
        ("colour", "red"),
    ],
)
def test_an_odd_manifest_is_refused(manifest: Manifest, field: str, value: object) -> None:
    fields = json.loads(manifest.to_json()) | {field: value}
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        Manifest.from_json(json.dumps(fields))


def test_a_manifest_needs_every_field(manifest: Manifest) -> None:
    fields = json.loads(manifest.to_json())
    for name in fields:
        with pytest.raises(ValueError, match=name):
            Manifest.from_json(json.dumps({key: value for key, value in fields.items() if key != name}))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"step": 1, "step": 2}', "[" * 100_000])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w+"):
        Manifest.from_json(text)


def test_a_newer_format_is_named_even_where_its_fields_are_unknown() -> None:
    with pytest.raises(NewerFormatError, match=rf"format version {FORMAT_VERSION + 1}.*newer paddle_fsdp_ckpt") as caught:
        Manifest.from_json(json.dumps({"format_version": FORMAT_VERSION + 1, "shards": []}))
    assert isinstance(caught.value, CheckpointError)


@pytest.mark.parametrize(
    "name",
    [
        "../0_0.safetensors",
        "/etc/passwd",
        "0_0.safetensors/../../x",
        "00_0.safetensors",
        "0_0.safetensors\n",
        "٠_0.safetensors",
        "",
        "0_1.safetensors",
    ],
)
def test_a_file_name_that_is_not_plain_is_refused(manifest: Manifest, name: str) -> None:
    fields = json.loads(manifest.to_json())
    fields["files"][0]["name"] = name
    with pytest.raises(UnsafeCheckpointError, match="N_0.safetensors"):
        Manifest.from_json(json.dumps(fields))


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ((1, 2), "extra_state is a tuple"),
        ({"a": [1, {2: 3}]}, r"extra_state\['a'\]\[1\] has the key 2"),
        ([b""], r"extra_state\[0\] is a bytes"),
    ],
)
def test_a_value_that_json_would_change_is_refused(value: object, where: str) -> None:
    with pytest.raises(ValueError, match=where):
        check_json(value, "extra_state")


def test_left_overs_name_their_target() -> None:
    nonce = "0123456789abcdef"
    assert parse_left_over(staging_name("step_1", nonce)) == ("step_1", "staging")
    assert parse_left_over(replaced_name("a.staging-b", nonce)) == ("a.staging-b", "replaced")
    for name in ("step_1", ".step_1.staging-", ".step_1.staging-0123", "step_1.staging-" + nonce, "." + nonce):
        assert parse_left_over(name) is None
