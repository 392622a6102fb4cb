from __future__ import annotations

import numpy as np
import pytest
import torch
from verifier_support import request

from cloud_verifier.scheduler import Budget, plan
from cloud_verifier.sessions import Session, Step
from shared.messages import DraftBlock, Generate


def session(name: str, num_tokens: int, kv_len: int, since: float = 0.0, step: Step | None = None) -> Session:
    made = Session(
        name, "", request([1] * num_tokens), request([1]).sampling, 10_000, [1] * num_tokens, num_tokens, 100
    )
    made.slots = np.arange(kv_len)
    made.waiting_since = since
    if step is not None:
        made.steps.append(step)
    return made


def block(num_drafted: int, base_len: int, at: float) -> Step:
    return Step(DraftBlock(1, 0, base_len, (2,) * num_drafted, b""), at)


def writing(base_len: int, at: float) -> Step:
    return Step(Generate(1, 0, base_len, 5), at)


def test_everything_that_waits_goes_into_one_pass():
    sessions = [session(str(i), 20, 19, step=block(4, 20, i)) for i in range(8)]
    sessions += [session("w", 20, 19, step=writing(20, 9))]
    works = plan(sessions, Budget())
    assert [len(work.tokens) for work in works] == [5] * 8 + [1]
    assert [work.num_logits for work in works] == [5] * 8 + [1]


def test_the_oldest_step_goes_first_and_the_budget_holds():
    sessions = [session(str(i), 20, 19, step=block(9, 20, at=-i)) for i in range(10)]
    works = plan(sessions, Budget(pass_tokens=35))
    assert [work.session.session_id for work in works] == ["9", "8", "7"]
    huge = plan([session("h", 20, 19, step=block(60, 20, 0))], Budget(pass_tokens=35))
    assert len(huge[0].tokens) == 61  # or it would wait for ever


def test_prompts_get_their_share_beside_steps_and_all_of_it_alone():
    prompt = session("p", 1000, 0)
    steps = [session(str(i), 20, 19, step=block(9, 20, i)) for i in range(10)]
    beside = plan([prompt, *steps], Budget(pass_tokens=50, prefill_share=16))
    assert [len(work.tokens) for work in beside] == [10] * 5 + [16]
    alone = plan([prompt], Budget(pass_tokens=50, prefill_share=16))
    assert [len(work.tokens) for work in alone] == [50]
    assert alone[0].num_logits == 0


def test_a_prompt_stops_one_short_and_its_step_takes_the_rest():
    assert len(plan([session("p", 30, 0)], Budget())[0].tokens) == 29
    whole = plan([session("p", 300, 0, step=block(4, 300, 0))], Budget())
    assert (len(whole[0].tokens), whole[0].num_logits) == (304, 5)
    part = plan([session("p", 600, 0, step=block(4, 600, 0))], Budget())
    assert (len(part[0].tokens), part[0].step) == (512, None)


def test_a_prompt_whose_step_has_come_keeps_its_place():
    first = session("first", 400, 0, since=1.0, step=block(4, 400, at=9.0))
    second = session("second", 400, 0, since=2.0)
    works = plan([second, first], Budget(pass_tokens=100))
    assert [work.session.session_id for work in works] == ["first"]


def test_a_kept_row_saves_a_row_and_a_token():
    held = session("k", 20, 20, step=block(4, 20, 0))
    held.kept_row = torch.zeros(3)
    (work,) = plan([held], Budget())
    assert (len(work.tokens), work.num_logits) == (4, 4)


@pytest.mark.parametrize("name", ["pass_tokens", "prefill_share"])
def test_a_budget_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=name):
        Budget(**{name: 0})
