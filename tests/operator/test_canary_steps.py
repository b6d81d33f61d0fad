"""The steps of a canary: what moves one, and what never does."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_operator.desired.rollout import CanaryState, advance
from argosy_operator.observation import Figures, SplitFigures
from argosy_resource.rollout import CanaryRollout

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
ANALYSIS = {"maxErrorRate": 0.01, "minRequests": 10, "windowSeconds": 60}
SOME = Figures(attempts=100)
FAILED = Figures(attempts=100, failures=50)
GOOD = SplitFigures(is_complete=True, canary=SOME, stable=SOME, canary_total=SOME, stable_total=SOME)
BAD = SplitFigures(is_complete=True, canary=FAILED, canary_total=FAILED)
UNCLEAR = SplitFigures(is_complete=True, canary=Figures(attempts=100, failures=2))
NONE = SplitFigures(is_complete=True)


class Trial:
    """A canary of revision `new` of a service with 10 replicas, as time passes."""

    def __init__(self, **spec: Any) -> None:
        self.given = {"steps": [{"weight": 10}, {"weight": 50, "replicas": 5}], "analysis": ANALYSIS, **spec}
        self.seconds = 0
        self.replicas = 10
        self.state = CanaryState(revision="new", missing_since=self.now)
        self.waits_for = ""
        self.is_held = False
        self.began = ""

    @property
    def now(self) -> str:
        return (START + datetime.timedelta(seconds=self.seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")

    def edit(self, **spec: Any) -> Trial:
        self.given.update(spec)
        return self

    def after(
        self, seconds: int, figures: SplitFigures = GOOD, *, routable: int | None = None, trouble: str = ""
    ) -> tuple[str, int, int]:
        """Phase, index of the step and weight, `seconds` later."""
        self.seconds += seconds
        self.state, self.waits_for, self.is_held = advance(
            msgspec.convert(self.given, CanaryRollout),
            self.state,
            replicas=self.replicas,
            routable=self.state.size if routable is None else routable,
            trouble=trouble,
            figures=figures,
            now=self.now,
            began=self.began,
            deadline_s=1800,
        )
        return self.state.phase, self.state.step, self.state.weight


def test_steps_follow_each_other_while_the_figures_are_good() -> None:
    trial = Trial()
    assert trial.after(0, routable=0) == ("stepping", 0, 0)
    assert trial.waits_for == "0 of 1 canary replicas routable"
    assert trial.after(5) == ("stepping", 0, 10)
    assert trial.after(59) == ("stepping", 0, 10)
    assert trial.after(1) == ("stepping", 1, 10), "the next step's replicas come before its weight"
    assert (trial.state.size, trial.state.since) == (5, "")
    assert trial.after(100, routable=4) == ("stepping", 1, 10)
    assert trial.after(1, routable=5) == ("stepping", 1, 50)
    assert trial.after(59) == ("stepping", 1, 50)
    assert trial.after(1)[0] == "promoting"


def test_a_bad_figure_ends_it_at_once_and_for_good() -> None:
    trial = Trial()
    trial.after(0)
    assert trial.after(1, BAD) == ("failed", 0, 0)
    assert "error rate 50 %" in trial.state.message
    assert trial.state.size == 0
    assert trial.after(10_000, GOOD) == ("failed", 0, 0)
    promote = {"type": "Promote", "revision": "new"}
    assert trial.edit(action=promote).after(0)[0] == "promoting", "a person may decide otherwise"
    assert trial.state.message == "promoted by spec.rollout.canary.action"


def test_a_figure_that_may_be_chance_ends_nothing_and_passes_nothing() -> None:
    trial = Trial()
    trial.after(0)
    assert trial.after(60, UNCLEAR) == ("stepping", 0, 10)
    assert trial.waits_for.startswith(
        "error rate 2 %, at most 1 %: 2 of 100 requests failed; that may be chance"
    )
    assert trial.after(1) == ("stepping", 1, 10)


@pytest.mark.parametrize(
    ("step", "replicas", "size"),
    [
        ({"weight": 0}, 10, 1),
        ({"weight": 5}, 10, 1),
        ({"weight": 10}, 10, 1),
        ({"weight": 20}, 10, 2),
        ({"weight": 40}, 10, 6),
        ({"weight": 50}, 10, 10),
        ({"weight": 75}, 10, 10),
        ({"weight": 100}, 10, 10),
        ({"weight": 50}, 1, 1),
        ({"weight": 50, "replicas": 3}, 10, 3),
    ],
    ids=str,
)
def test_a_step_has_replicas_for_its_weight_at_the_load_of_the_old_ones(
    step: dict[str, Any], replicas: int, size: int
) -> None:
    trial = Trial(steps=[step])
    trial.replicas = replicas
    trial.after(0, routable=0)
    assert trial.state.size == size
    weight = step["weight"]
    if "replicas" not in step and size / (size + replicas) > weight / 100:
        assert size == 1, "only the least canary is less loaded than the old replicas"


def test_a_weight_is_known_since_when_it_applies_over_steps_that_share_it() -> None:
    trial = Trial(steps=[{"weight": 10}, {"weight": 10, "pauseSeconds": 100}, {"weight": 20}])
    trial.after(0)
    began = trial.state.weight_since
    assert began == trial.now
    trial.after(60)
    assert (trial.state.step, trial.state.weight_since, trial.state.since) == (1, began, trial.now)
    trial.after(100, routable=1)
    trial.after(1, routable=2)
    assert (trial.state.weight, trial.state.weight_since) == (20, trial.now)


def test_without_data_it_stays() -> None:
    trial = Trial()
    trial.after(0)
    for figures in (NONE, SplitFigures(), msgspec.structs.replace(GOOD, is_complete=False)):
        assert trial.after(100_000, figures) == ("stepping", 0, 10)
        assert trial.waits_for
        assert not trial.is_held


def test_replicas_that_do_not_come_up_fail_it_after_the_deadline() -> None:
    trial = Trial()
    assert trial.after(1800, routable=0) == ("stepping", 0, 0)
    assert trial.after(1, routable=0, trouble="pod p: last exit: code 2") == ("failed", 0, 0)
    assert trial.state.message == (
        "0 of 1 canary replicas routable after 1800 s; pod p: last exit: code 2"
    ), "the replicas go, and their trouble with them"


def test_the_deadline_begins_with_the_operator_that_measures_it() -> None:
    trial = Trial()
    trial.after(0, routable=0)
    trial.seconds += 100_000  # the next leader's clock is ahead
    trial.began = trial.now
    assert trial.after(1800, routable=0) == ("stepping", 0, 0)
    assert trial.after(1, routable=0)[0] == "failed"


def test_a_clock_that_is_set_back_keeps_no_canary_for_as_long() -> None:
    trial = Trial()
    trial.seconds = 86_400
    assert trial.after(0) == ("stepping", 0, 10)
    trial.seconds = 100
    assert trial.after(0) == ("stepping", 0, 10)
    assert trial.after(59) == ("stepping", 0, 10), "the step lasts as long as it should"
    assert trial.after(1)[1] == 1
    lost = Trial()
    lost.seconds = 86_400
    lost.state = CanaryState(revision="new", missing_since=lost.now)
    assert lost.after(0, routable=0)[0] == "stepping"
    lost.seconds = 100
    assert lost.after(0, routable=0)[0] == "stepping"
    assert lost.after(1801, routable=0)[0] == "failed"


def test_a_step_that_holds_waits_for_a_person() -> None:
    trial = Trial(steps=[{"weight": 10, "hold": True}, {"weight": 50, "hold": True}])
    trial.after(0)
    assert trial.after(100_000) == ("stepping", 0, 10)
    assert trial.is_held
    assert trial.waits_for == "spec.rollout.canary.steps[0].hold is set"
    for action in (
        {"type": "Continue", "revision": "other", "step": 1},
        {"type": "Promote", "revision": "other"},
        {"type": "Abort", "revision": "other"},
    ):
        assert trial.edit(action=action).after(1) == ("stepping", 0, 10), "it names another revision"
    trial.edit(action={"type": "Continue", "revision": "new", "step": 1})
    assert trial.after(1) == ("stepping", 1, 10)
    assert trial.after(1, routable=10) == ("stepping", 1, 50)
    assert trial.after(100_000) == ("stepping", 1, 50), "the next step holds again"
    assert trial.waits_for == "spec.rollout.canary.steps[1].hold is set"
    assert trial.edit(action={"type": "Continue", "revision": "new", "step": 2}).after(1)[0] == "promoting"


def test_continue_does_not_replace_the_analysis() -> None:
    trial = Trial(
        steps=[{"weight": 10, "hold": True}], action={"type": "Continue", "revision": "new", "step": 1}
    )
    trial.after(0)
    assert trial.after(1000, NONE) == ("stepping", 0, 10)
    assert trial.after(1, BAD)[0] == "failed"


def test_hold_keeps_the_step_and_its_weight_but_not_a_bad_canary() -> None:
    trial = Trial(hold=True)
    assert trial.after(0) == ("stepping", 0, 0), "not even the first weight"
    assert trial.edit(hold=False).after(0) == ("stepping", 0, 10)
    assert trial.edit(hold=True).after(1000) == ("stepping", 0, 10)
    assert trial.is_held
    assert trial.after(1, BAD)[0] == "failed"


def test_an_aborted_canary_fails() -> None:
    trial = Trial(action={"type": "Abort", "revision": "new"})
    assert trial.after(0)[0] == "failed"
    assert "aborted" in trial.state.message


def test_time_alone_moves_a_canary_without_analysis() -> None:
    trial = Trial(steps=[{"weight": 10, "pauseSeconds": 300}, {"weight": 50, "replicas": 5}], analysis=None)
    trial.after(0)
    assert trial.after(299, SplitFigures()) == ("stepping", 0, 10)
    assert trial.after(1, SplitFigures(), routable=5) == ("stepping", 1, 50)
    assert trial.after(0, SplitFigures())[0] == "promoting"


def test_blue_green_gives_every_request_to_a_whole_second_set() -> None:
    trial = Trial(steps=[{"weight": 100}])
    assert trial.after(0, routable=9) == ("stepping", 0, 0)
    assert trial.state.size == 10
    assert trial.after(0, routable=10) == ("stepping", 0, 100)
    assert trial.after(60) == ("promoting", 0, 100), (
        "the old replicas get no requests while they are replaced"
    )
    assert trial.state.size == 10


def test_blue_green_is_compared_with_a_whole_window_of_the_old_replicas() -> None:
    trial = Trial(steps=[{"weight": 100}])
    trial.state = msgspec.structs.replace(trial.state, weight_since=trial.now)
    trial.after(0, routable=0)
    assert trial.after(59, routable=10) == ("stepping", 0, 0)
    assert trial.waits_for == "the stable side is measured for 60 s before it gets no requests"
    assert trial.after(1, routable=10) == ("stepping", 0, 100)


def test_no_step_is_passed_while_replicas_of_the_canary_are_missing() -> None:
    for analysis, figures in ((ANALYSIS, GOOD), (None, SplitFigures())):
        trial = Trial(steps=[{"weight": 50, "replicas": 5, "pauseSeconds": 60}], analysis=analysis)
        trial.after(0, routable=0)
        trial.after(0, routable=5)
        for routable in (0, 4):
            assert trial.after(600, figures, routable=routable) == ("stepping", 0, 50)
            assert trial.waits_for == f"{routable} of 5 canary replicas routable"
            assert not trial.is_held
        assert trial.after(1, figures, routable=5)[0] == "promoting"


def test_replicas_that_are_lost_within_a_step_fail_it_after_the_deadline() -> None:
    trial = Trial(hold=True)
    trial.edit(hold=False).after(0)
    trial.edit(hold=True).after(10_000)
    assert trial.after(0, routable=0) == ("stepping", 0, 10)
    assert trial.after(1800, NONE, routable=0) == ("stepping", 0, 10)
    assert trial.after(1, NONE, routable=1) == ("stepping", 0, 10), "the time counts anew once they are back"
    trial.after(1000, routable=0)
    assert trial.after(1800, routable=0) == ("stepping", 0, 10)
    assert trial.after(1, routable=0)[0] == "failed"
    assert "0 of 1 canary replicas routable after 1800 s" in trial.state.message


def test_an_edited_weight_starts_the_step_anew() -> None:
    trial = Trial()
    trial.after(0)
    assert trial.edit(steps=[{"weight": 20}]).after(59, routable=1) == ("stepping", 0, 10)
    assert trial.waits_for == "1 of 2 canary replicas routable"
    assert trial.after(59) == ("stepping", 0, 20)
    assert trial.after(59) == ("stepping", 0, 20)
    assert trial.after(1)[0] == "promoting"


def test_an_edit_raises_the_weight_only_with_its_replicas_and_without_hold() -> None:
    for steps in ([{"weight": 100}], [{"weight": 100}, {"weight": 100}]):
        trial = Trial(steps=[{"weight": 5}, {"weight": 10}])
        trial.after(0)
        trial.after(60)
        assert trial.after(0) == ("stepping", 1, 10)
        assert trial.edit(steps=steps, hold=True).after(1, routable=1)[2] == 10
        assert (trial.state.size, trial.is_held) == (10, False)
        assert trial.after(1, routable=10)[2] == 10
        assert trial.is_held
        assert trial.edit(hold=False).after(60, routable=9)[2] == 10
        assert trial.after(1, routable=10)[2] == 100


def test_a_weight_grows_only_with_figures_of_the_stable_side_to_compare_with() -> None:
    canary = Figures(attempts=100, streams=100, ttft_p90_s=0.1, prompt_tokens=10, cached_tokens=9)
    for bound, enough, few in (
        ("maxTtftP90Ratio", Figures(streams=10, ttft_p90_s=0.1), Figures(streams=9, ttft_p90_s=0.1)),
        (
            "minCachedShareRatio",
            Figures(attempts=10, prompt_tokens=10, cached_tokens=9),
            Figures(attempts=10),
        ),
    ):
        trial = Trial(steps=[{"weight": 100}], analysis={**ANALYSIS, bound: 1})
        trial.after(0, SplitFigures(), routable=0)
        assert trial.after(10_000, SplitFigures(is_complete=True, stable=few)) == ("stepping", 0, 0)
        assert "stable side to compare" in trial.waits_for
        assert trial.after(1, SplitFigures(is_complete=True, stable=enough)) == ("stepping", 0, 100)
        assert trial.after(60, SplitFigures(is_complete=True, canary=canary))[0] == "promoting", bound


def test_an_edit_lowers_the_weight_at_once() -> None:
    trial = Trial(steps=[{"weight": 50}])
    trial.after(0, routable=0)
    trial.after(1)
    assert trial.edit(steps=[{"weight": 10, "replicas": 8}], hold=True).after(1) == ("stepping", 0, 10)


def test_a_canary_is_judged_while_the_next_step_gets_its_replicas() -> None:
    trial = Trial()
    trial.after(0)
    assert trial.after(60) == ("stepping", 1, 10)
    assert trial.after(1, BAD, routable=1)[0] == "failed"


def test_steps_may_be_removed_while_it_runs() -> None:
    trial = Trial()
    trial.after(0)
    trial.after(60)
    assert trial.after(0, routable=5) == ("stepping", 1, 50)
    assert trial.edit(steps=[{"weight": 50, "replicas": 5}]).after(60)[0] == "promoting"


def test_a_later_step_never_has_fewer_replicas() -> None:
    trial = Trial(steps=[{"weight": 10, "replicas": 4}, {"weight": 20}])
    trial.after(0)
    assert trial.state.size == 4
    trial.after(4, routable=4)
    trial.after(60, routable=4)
    assert (trial.state.step, trial.state.size) == (1, 4)


@given(
    st.lists(
        st.tuples(st.integers(0, 200), st.sampled_from([GOOD, BAD, NONE, SplitFigures()]), st.integers(0, 6)),
        max_size=40,
    )
)
def test_whatever_happens_it_is_promoted_only_after_good_figures_at_every_weight(
    happenings: list[tuple[int, SplitFigures, int]],
) -> None:
    trial = Trial()
    passed: set[int] = set()
    for seconds, figures, routable in happenings:
        before = trial.state
        phase, step, weight = trial.after(seconds, figures, routable=routable)
        if before.phase == "failed":
            assert phase == "failed"
            continue
        if figures == BAD and before.since and before.phase == "stepping":
            assert (phase, weight, trial.state.size) == ("failed", 0, 0)
        if phase == "promoting":
            assert figures == GOOD
            assert passed | {before.step} == {0, 1}
            return
        if step > before.step:
            assert figures == GOOD
            assert before.since
            passed.add(before.step)
        assert weight in (0, 10, 50)
        again = trial.after(0, figures, routable=routable)
        if figures != BAD and not (trial.state.since and trial.state.since == trial.now):
            assert again == (phase, step, weight), "at rest nothing changes"
