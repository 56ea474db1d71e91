"""Formulas of memory: the highest line wins for any rows, slices are those of FSDP2, placements add up."""

import math
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_embodied.tools import memory
from rlinf_embodied.tools.footprint import Envelope, envelope_of
from rlinf_embodied.tools.memory import (
    Fit,
    LearnerKind,
    Parameter,
    PassWork,
    Placement,
    PolicyShape,
    fit_rows,
    fits,
    term_rows,
)

LINES = st.lists(st.tuples(st.integers(-1000, 10_000), st.integers(0, 500)), min_size=1, max_size=12)
PASS = PassWork(with_gradients=Envelope(((400.0, 10.0),)), into_gradients=Envelope(((0.0, 10.0),)))
LEAN = PassWork(with_gradients=Envelope(((400.0, 2.0),)), into_gradients=Envelope(((0.0, 2.0),)))
POLICY = PolicyShape(  # 60 values in layers, 40 elsewhere, of which 10 are frozen
    parameters=(
        Parameter((3, 10), trained=True, unit=1),
        Parameter((3, 10), trained=True, unit=2),
        Parameter((30,), trained=True),
        Parameter((10,), trained=False),
    ),
    value_bytes=2,
    rollout=Envelope(((7.0, 100.0),)),
    plain=PASS,
    checkpointed=LEAN,
)


@given(LINES, st.integers(0, 1000))
def test_an_envelope_is_the_highest_line_for_any_rows(lines, rows):
    assert envelope_of(lines).at(rows) == max(fixed + slope * rows for fixed, slope in lines)


@given(LINES, st.integers(0, 200_000))
def test_the_most_rows_fit_and_one_more_does_not(lines, room):
    envelope = envelope_of([*lines, (0, 1)])
    most = envelope.most_rows(room)
    assert most == 0 or envelope.at(most) <= room
    assert envelope.at(most + 1) > room


def test_work_without_rows_fits_or_does_not():
    assert Envelope(((5.0, 0.0), (0.0, 1.0))).most_rows(4.0) == 0
    assert Envelope(((5.0, 0.0), (0.0, 1.0))).most_rows(5.0) == 5


@given(st.integers(1, 40), st.integers(1, 9))
def test_a_slice_is_the_first_of_torchs_pieces(length, devices):
    piece = torch.zeros(length, 3).chunk(devices)[0]
    assert Parameter((length, 3), trained=True).slice_size(devices) == piece.numel()


def test_the_terms_are_those_of_their_formulas():
    assert (POLICY.num_parameters, POLICY.num_trained) == (100, 90)
    assert memory.weights(POLICY) == 2 * 100
    assert memory.masters(POLICY) == 4 * 90
    assert memory.masters(replace(POLICY, value_bytes=4)) == 0
    assert memory.gradient(POLICY) == 4 * 90
    assert memory.moments(POLICY) == 8 * 90
    assert memory.units(POLICY) == (40, 30)


def test_slices_of_two_devices_are_cut_along_first_axes():
    assert memory.slices(POLICY, 1) == 4 * 90 + 2 * 10
    assert memory.slices(POLICY, 2) == 4 * (20 + 20 + 15) + 2 * 5
    assert memory.moment_slices(POLICY, 2) == 8 * (20 + 20 + 15)


def test_a_replicated_pass_needs_what_it_keeps_and_at_least_its_gradients_beside_their_sums():
    work = memory.replicated_work(POLICY, checkpointing=False)
    assert work.at(1) == 2 * 360 + (2 * 90 + 360)  # more than the three vectors of a step
    assert work.at(100) == 2 * 360 + 400 + 10 * 100
    assert memory.replicated_work(POLICY, checkpointing=True).at(1000) == 2 * 360 + 400 + 2 * 1000


def test_a_sharded_pass_gathers_two_layers_and_what_is_in_none():
    work = memory.sharded_work(POLICY, 2, checkpointing=False)
    assert work.at(100) == 2 * (40 + 2 * 30) + 360 + 10 * 100
    assert work.at(0) == 2 * 40 + 360 + 4 * 30 * 1.5
    assert memory.sharded_work(POLICY, 1, checkpointing=False).at(0) == 8 * 90  # the step


def by(found: list[Fit], **wanted: object) -> Fit:
    (one,) = [fit for fit in found if all(getattr(fit, name) == value for name, value in wanted.items())]
    return one


def test_placements_add_up():
    found = fits(POLICY, [1, 4], rollout_rows=3)
    kinds = {"checkpointing": False, "learner": LearnerKind.replicated}
    own, rollout = 200 + 360 + 720, 307
    work = memory.replicated_work(POLICY, checkpointing=False)
    assert by(found, **kinds, placement=Placement.resident).needed(50) == own + max(work.at(50), rollout)
    assert by(found, **kinds, placement=Placement.switching).needed(50) == own + work.at(50)
    assert by(found, **kinds, placement=Placement.apart).rollout == 200 + rollout
    sharded = {"checkpointing": True, "learner": LearnerKind.sharded, "num_devices": 4}
    own, work = memory.slices(POLICY, 4) + memory.moment_slices(POLICY, 4), memory.sharded_work(POLICY, 4, True)
    assert by(found, **sharded, placement=Placement.resident).needed(50) == own + 200 + work.at(50)
    assert by(found, **sharded, placement=Placement.switching).needed(50) == own + work.at(50)
    half = memory.slices(POLICY, 2) + memory.moment_slices(POLICY, 2) + memory.sharded_work(POLICY, 2, True).at(50)
    assert by(found, **sharded, placement=Placement.apart).needed(50) == half
    alone = [fit for fit in found if fit.num_devices == 1]
    assert {fit.placement for fit in alone} == {Placement.resident, Placement.switching}


def test_a_table_says_what_is_left_what_lacks_and_what_fits():
    found = fits(POLICY, [2], rollout_rows=3)
    rows = fit_rows("full", found, 1, 1e10)
    assert {row["plain: left"] for row in rows} == {"10.0"}
    assert all(int(row["plain: most rows"]) > 10**8 for row in rows)
    rows = fit_rows("full", found, 10**9, 5e9)
    assert {row["plain: left"] for row in rows} == {"lacks 5.0"}
    assert {row["checkpointed: left"] for row in rows} == {"3.0"}
    none = fit_rows("full", fits(POLICY, [2], rollout_rows=10**9), 1, 1e9)
    assert [row["placement"] for row in none if "does not fit" in row["placement"]]
    assert {row["plain: most rows"] for row in none if row["placement"] != Placement.switching} == {"0"}


def test_terms_have_a_column_per_way_to_train():
    rows = term_rows({"LoRA": POLICY, "full": replace(POLICY, value_bytes=4)})
    assert {"term": "parameters", "LoRA": "100", "full": "100"} in rows
    assert len({row["term"] for row in rows}) == len(rows) == 9
    assert not any(math.isnan(float(row["full"].replace(",", ""))) for row in rows)
