from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from checkpoints import make_manifest, reseal

from paddle_fsdp_ckpt.errors import CheckpointError, NewerFormatError, UnsafeCheckpointError
from paddle_fsdp_ckpt.storage.format import FORMAT_VERSION, parse_left_over, rank_file_name, replaced_name, staging_name
from paddle_fsdp_ckpt.storage.json_values import check_json
from paddle_fsdp_ckpt.storage.manifest import FileRecord, Manifest

RECORDS = [
    FileRecord(rank_file_name(0), 1000, 3, "0123456789abcdef" * 2, 104),
    FileRecord(rank_file_name(1), (1 << 20) + 900, 2, "0123456789abcdef" * 3, 96),
]


@pytest.fixture
def manifest() -> Manifest:
    return make_manifest(RECORDS)


def test_a_manifest_comes_back_from_its_text_as_it_was(manifest: Manifest) -> None:
    discarding = replace(manifest, discarded={40: 1_800_000_000_123_456_789, 30: 0, 50: "0123456789abcdef"})
    for one in (manifest, discarding):
        assert Manifest.from_json(one.to_json()) == one
    assert "discarded" not in manifest.to_json()  # which older readers don't know


def test_losses_that_are_not_finite_come_back() -> None:
    fields = json.loads(make_manifest(RECORDS).to_json())
    fields["extra_state"] = {"best": float("inf")}
    assert Manifest.from_json(reseal(fields)).extra_state == {"best": float("inf")}


def test_any_flipped_bit_or_cut_in_the_text_is_refused(manifest: Manifest) -> None:
    text = manifest.to_json().encode()
    for position in range(8 * len(text)):
        changed = bytearray(text)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(ValueError, match=r"\w+"):
            Manifest.from_json(changed.decode("utf-8"))
    for length in range(len(text)):
        with pytest.raises(ValueError, match=r"\w+"):
            Manifest.from_json(text[:length].decode())


def test_a_damaged_text_can_be_read_for_what_it_may_be_worth(manifest: Manifest) -> None:
    text = manifest.to_json().replace('"epoch": 3', '"epoch": 4')
    with pytest.raises(ValueError, match="damaged or edited"):
        Manifest.from_json(text)
    assert Manifest.from_json(text, check_seal=False).extra_state == {"epoch": 4}
    read = Manifest.from_json(text.replace('"without_gradient"', '"without_gradienu"'), check_seal=False)
    assert (read.extra_state, read.optimizers, read.files) == ({"epoch": 4}, [], manifest.files)


def test_a_manifest_beyond_its_bound_is_not_written(monkeypatch: pytest.MonkeyPatch, manifest: Manifest) -> None:
    monkeypatch.setattr("paddle_fsdp_ckpt.storage.manifest.MAX_MANIFEST_NBYTES", 500)
    with pytest.raises(ValueError, match="500 are allowed; keep less in extra_state"):
        manifest.to_json()


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
        ("optimizers", None),
        ("optimizers", ["AdamW"]),
        ("optimizers", [{"class": "AdamW", "learning_rate": {}, "groups": [{}], "without_gradient": []}]),
        ("optimizers", [{"class": "AdamW", "learning_rate": {}, "groups": [{"parameters": [1], "settings": {}}], "without_gradient": []}]),
        ("optimizers", [{"class": "AdamW", "learning_rate": 0.1, "groups": [], "without_gradient": []}]),
        ("files", {}),
        ("files", [RECORDS[1].to_json(), RECORDS[0].to_json()]),
        ("files", [RECORDS[0].to_json(), RECORDS[0].to_json()]),
        ("files", [RECORDS[0].to_json(), {**RECORDS[1].to_json(), "size": -5}]),
        ("files", [RECORDS[0].to_json(), {**RECORDS[1].to_json(), "digests": "ab"}]),
        ("files", [RECORDS[0].to_json(), {**RECORDS[1].to_json(), "colour": "red"}]),
        ("files", [RECORDS[0].to_json(), {**RECORDS[1].to_json(), "size": 1 << 63}]),
        ("files", [RECORDS[0].to_json(), {**RECORDS[1].to_json(), "digests": "0123456789abcdef"}]),
        ("files", [RECORDS[0].to_json(), {**RECORDS[1].to_json(), "digests": "0123456789ABCDEF" * 3}]),
        ("files", [RECORDS[0].to_json(), {**RECORDS[1].to_json(), "header_nbytes": 1 << 21}]),
        ("files", [RECORDS[0].to_json(), {"name": "1_0.safetensors"}]),
        ("paddle_metadata", RECORDS[0].to_json()),
        ("paddle_metadata", "0.metadata"),
        ("format_version", 0),
        ("format_version", "1"),
        ("format_version", None),
        ("colour", "red"),
        ("discarded", {"40": 1}),
        ("discarded", [[40]]),
        ("discarded", [[40, -1]]),
        ("discarded", [[40, "0123456789abcde"]]),
        ("discarded", [[40, "0123456789ABCDEF"]]),
        ("discarded", [[40, None]]),
    ],
)
def test_an_odd_manifest_is_refused(manifest: Manifest, field: str, value: object) -> None:
    fields = json.loads(manifest.to_json()) | {field: value}
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        Manifest.from_json(reseal(fields))


def test_a_manifest_needs_every_field(manifest: Manifest) -> None:
    fields = json.loads(manifest.to_json())
    for name in fields:
        rest = {key: value for key, value in fields.items() if key != name}
        text = json.dumps(rest) if name == "digest" else reseal(rest)
        with pytest.raises(ValueError, match=name):
            Manifest.from_json(text)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"step": 1, "step": 2}', "[" * 100_000])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w+"):
        Manifest.from_json(text)


@pytest.mark.parametrize("dump", [json.dumps, reseal])
def test_a_newer_format_is_named_even_where_its_fields_are_unknown(dump: Callable[[dict[str, object]], str]) -> None:
    text = dump({"format_version": FORMAT_VERSION + 1, "shards": []})
    with pytest.raises(NewerFormatError, match=rf"format version {FORMAT_VERSION + 1}.*newer paddle_fsdp_ckpt") as caught:
        Manifest.from_json(text)
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
        Manifest.from_json(reseal(fields))


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
