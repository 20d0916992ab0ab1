"""Hybrid sharding (HSDP): several replicas of a sharded model train as one unfused process does on the global batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hybrid_cases
import pytest
from harness import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize(
    "name",
    [
        "attention_blocks",
        "experts_missed_by_a_rank",
        "generator_and_discriminator",
        "gradients_clipped_by_hand",
        "optimizer_clip_by_global_norm",
        "optimizer_groups",
        "parameters_smaller_than_the_world",
        "parameters_unused_on_one_rank",
        "recompute_around_the_whole_model",
    ],
)
def test_trains_like_one_process(ranks: Ranks, name: str) -> None:
    ranks(4).run(hybrid_cases.train, name, 2)


@pytest.mark.parametrize("name", ["parameters_unused_on_one_rank", "optimizer_groups"])
def test_replicas_of_one_rank_each(ranks: Ranks, name: str) -> None:
    ranks(3).run(hybrid_cases.train, name, 1)


def test_whole_tensors_of_replicas(ranks: Ranks) -> None:
    ranks(4).run(hybrid_cases.whole_tensors)


def test_running_statistics_are_of_all_replicas(ranks: Ranks) -> None:
    ranks(4).run(hybrid_cases.running_statistics)


def test_groups_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    for found in ranks(4).run(hybrid_cases.groups_that_do_not_fit):
        assert "don't fit together" in found["twice the same"]
        assert "don't fit together" in found["shared"]
        assert "replicate_group needs group" in found["no group"]


@pytest.mark.parametrize(("what", "text"), [("frozen", "are frozen"), ("learning rate", "learning rate"), ("set_value", "set_value")])
def test_what_one_rank_does_otherwise_all_ranks_refuse(ranks: Ranks, what: str, text: str) -> None:
    for message in ranks(4).run(hybrid_cases.one_rank_differs, what):
        assert text in message


def test_replicas_that_parted_are_not_saved(ranks: Ranks, tmp_path: Path) -> None:
    for of_parameters, of_states in ranks(4).run(hybrid_cases.replicas_that_parted, str(tmp_path / "checkpoint")):
        assert "ranks 0 and 2 are replicas, and their parameters differ" in of_parameters
        assert "ranks 0 and 2 are replicas, and their optimizer states differ" in of_states


def test_models_over_other_replicas_are_saved_by_themselves(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(4).run(hybrid_cases.models_over_other_replicas, str(tmp_path / "checkpoint")):
        assert "a over [0, 1, 2, 3], b over [0, 1] and [2, 3]" in message


def test_fleets_data_parallel_group_replicates_by_default(ranks: Ranks) -> None:
    for other_group, tensor_parallel, pipeline, segments, only_replicas in ranks(4).run(hybrid_cases.under_fleet):
        assert "neither its sharding group nor all ranks" in other_group
        assert "mp_degree=2" in tensor_parallel
        assert "pp_degree=2" in pipeline
        assert "sep_degree=2" in segments
        assert "dp_degree=2 and sharding_degree=1" in only_replicas
