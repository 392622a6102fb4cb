import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.history import TokenHistory, adjust, needs_history
from shared.messages import SamplingParams
from shared.sampling import probabilities

LOGITS = np.array([1.0, -1.0, 2.0, 0.5, 3.0, -2.0], np.float32)


def changed(tokens, prompt_len, eos_ids=(), **params):
    return adjust(LOGITS, SamplingParams(**params), TokenHistory(tokens, prompt_len, eos_ids)).tolist()


def test_the_repetition_penalty_counts_prompt_and_answer():
    assert changed([0, 1, 2], 2, repetition_penalty=2.0) == [0.5, -2.0, 1.0, 0.5, 3.0, -2.0]


def test_presence_and_frequency_penalties_count_the_answer_alone():
    assert changed([0, 2, 2, 3], 1, presence_penalty=0.25) == [1.0, -1.0, 1.75, 0.25, 3.0, -2.0]
    assert changed([0, 2, 2, 3], 1, frequency_penalty=0.25) == [1.0, -1.0, 1.5, 0.25, 3.0, -2.0]


def test_bias_comes_before_penalties_and_may_name_ids_beyond_the_vocabulary():
    biased = changed([1], 1, repetition_penalty=2.0, logit_bias={1: 3.0, 99: 1.0})
    assert biased == [1.0, 1.0, 2.0, 0.5, 3.0, -2.0]


def test_an_answer_cannot_end_before_min_tokens():
    assert changed([0, 1, 2], 1, (4, 5), min_tokens=3)[4:] == [-np.inf, -np.inf]
    assert changed([0, 1, 2, 2], 1, (4, 5), min_tokens=3)[4:] == [3.0, -2.0]


def test_bad_words_are_stopped_at_their_last_token():
    words = ((3,), (1, 2), (0, 1, 4))
    assert changed([0, 1], 1, bad_words=words) == [1.0, -1.0, -np.inf, -np.inf, -np.inf, -2.0]
    assert changed([1, 0], 1, bad_words=words) == [1.0, -1.0, 2.0, -np.inf, 3.0, -2.0]


def test_only_parameters_that_look_back_need_history():
    assert not needs_history(SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1))
    for params in (
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {0: 1.0}},
        {"min_tokens": 1},
        {"bad_words": ((1,),)},
    ):
        assert needs_history(SamplingParams(**params))


def test_penalties_change_what_is_sampled_and_leave_the_logits_alone():
    before = LOGITS.copy()
    history = TokenHistory([4], 0)
    greedy = probabilities(LOGITS, SamplingParams(presence_penalty=2.0), history)
    assert greedy.tolist() == [0, 0, 1, 0, 0, 0]
    assert (before == LOGITS).all()


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 5), max_size=8),
    more=st.lists(st.integers(0, 5), max_size=6),
    prompt_len=st.integers(0, 4),
)
def test_rolling_back_rejected_drafts_leaves_no_trace(tokens, more, prompt_len):
    prompt_len = min(prompt_len, len(tokens))
    history, fresh = TokenHistory(tokens, prompt_len), TokenHistory(tokens, prompt_len)
    for token in more:
        history.append(token)
    assert history.answer_len == len(tokens) - prompt_len + len(more)
    history.truncate(len(tokens))
    assert vars(history) == vars(fresh)
    with pytest.raises(ValueError, match="prompt"):
        history.truncate(prompt_len - 1)
