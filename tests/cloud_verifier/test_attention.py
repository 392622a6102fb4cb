"""Which sessions share a call, and what each token sees."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_verifier.attention import Visibility, attend
from cloud_verifier.pass_layout import PassSpec, Segment, ancestors_of, plan_groups, prepare
from shared.faults import FaultKind, SpecwireError

SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 400)), min_size=1, max_size=20)
SPEC = PassSpec(padding_slot=999, heads_per_kv=3, dtype=torch.float32, device=torch.device("cpu"))


def layout_of(*segments: Segment):
    return prepare(segments, SPEC)


def chain(num_new: int, slots: list[int]) -> Segment:
    return Segment(np.arange(num_new), np.array(slots), num_new)


@settings(max_examples=100, deadline=None)
@given(SIZES)
def test_every_session_is_in_one_group_that_is_large_enough(sizes):
    new, contexts = [n for n, _ in sizes], [n + before for n, before in sizes]
    plans = plan_groups(new, contexts)
    assert sorted(index for plan in plans for index in plan.members) == list(range(len(sizes)))
    for plan in plans:
        assert plan.num_new == max(new[index] for index in plan.members)
        assert plan.context == max(contexts[index] for index in plan.members)


def test_equal_sessions_share_one_call():
    assert len(plan_groups([6] * 32, [256] * 32)) == 1


def test_a_chunk_of_a_prompt_has_a_call_of_its_own():
    plans = plan_groups([6, 512, 6, 6], [200, 600, 210, 190])
    assert [set(plan.members) for plan in plans] == [{0, 2, 3}, {1}]


def test_a_long_context_does_not_pad_short_ones():
    plans = plan_groups([6] * 9, [100] * 8 + [8000])
    assert [plan.context for plan in plans] == [100, 8000]


def test_padding_never_outweighs_the_work_and_the_calls():
    """The scored pairs stay within a constant of the sum over sessions, never their product."""
    rng = np.random.default_rng(1)
    for num_sessions in (8, 32, 64):
        new = rng.integers(1, 12, num_sessions).tolist()
        contexts = (np.array(new) + rng.integers(1, 2000, num_sessions)).tolist()
        scored = sum(len(p.members) * p.num_new * p.context for p in plan_groups(new, contexts))
        assert scored < 3 * sum(n * c for n, c in zip(new, contexts, strict=True)) + 20_000 * num_sessions


def test_one_session_in_consecutive_slots_is_read_in_place():
    (group,) = layout_of(chain(2, [5, 6, 7, 8])).layout.groups
    assert (group.gather, group.first_slot, group.rows) == (None, 5, None)
    (group,) = layout_of(chain(2, [5, 6, 8, 7])).layout.groups
    assert group.gather is not None


def test_one_token_a_session_needs_no_mask_where_contexts_are_equal():
    (group,) = layout_of(chain(1, [1, 2, 3]), chain(1, [4, 5, 6])).layout.groups
    assert group.mask is None
    (group,) = layout_of(chain(1, [1, 2, 3]), chain(1, [4, 5])).layout.groups
    assert group.mask is not None


def test_padding_reads_the_padding_slot_and_the_members_own_rows():
    prepared = layout_of(chain(3, [1, 2, 3, 4, 5]), chain(1, [7, 8]))
    (group,) = prepared.layout.groups
    assert group.gather.view(2, 5).tolist() == [[7, 8, 999, 999, 999], [1, 2, 3, 4, 5]]
    assert group.rows.view(2, 3).tolist() == [[3, 3, 3], [0, 1, 2]]
    assert prepared.layout.unpad.tolist() == [3, 4, 5, 0]
    assert prepared.layout.write.tolist() == [3, 4, 5, 8]
    assert prepared.positions.tolist() == [2, 3, 4, 1]
    assert prepared.keep.tolist() == [0, 1, 2, 3]


def test_positions_of_a_tree_are_depths():
    tree = Segment(np.arange(4), np.arange(9), 4, parents=np.array([-1, 0, -1, 1]))
    assert layout_of(tree).positions.tolist() == [5, 6, 5, 7]
    given_positions = Segment(np.arange(2), np.arange(4), 2, positions=np.array([7, 7]))
    assert layout_of(given_positions).positions.tolist() == [7, 7]


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-2]])
def test_a_tree_whose_parents_come_later_is_refused(parents):
    with pytest.raises(ValueError, match="parent"):
        ancestors_of(np.array(parents))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_dense_and_block_masks_show_each_token_what_it_may_see(data):
    num_members, num_new = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    before = data.draw(st.lists(st.integers(0, 9), min_size=num_members, max_size=num_members))
    tree = data.draw(st.booleans())
    context = max(before) + num_new
    parents = [data.draw(st.integers(-1, i - 1)) if tree else i - 1 for i in range(num_new)]
    expected = np.zeros((num_members, num_new, context), dtype=bool)
    for member, first in enumerate(before):
        for row in range(num_new):
            expected[member, row, :first] = True
            at = row
            while at >= 0:
                expected[member, row, first + at] = True
                at = parents[at]
    ancestors = None
    if tree:
        ancestors = torch.from_numpy(np.stack([ancestors_of(np.array(parents))] * num_members))
    visible = Visibility(torch.tensor(before), num_new, context, ancestors)
    dense = visible.dense_mask(2, torch.float32)
    assert dense.shape == (num_members, 1, 2 * num_new, context)
    np.testing.assert_array_equal((dense[:, 0] == 0).numpy(), expected.repeat(2, axis=1))
    blocks = visible.block_mask(2)
    b, q, s = torch.meshgrid(
        torch.arange(num_members), torch.arange(2 * num_new), torch.arange(context), indexing="ij"
    )
    np.testing.assert_array_equal(blocks.mask_mod(b, b, q, s).numpy(), expected.repeat(2, axis=1))


def test_a_model_that_does_not_hand_the_layout_through_is_refused():
    query = torch.zeros(1, 2, 1, 4)
    with pytest.raises(SpecwireError) as caught:
        attend(torch.nn.Identity(), query, query, query, None)
    assert caught.value.kind == FaultKind.UNSUPPORTED_MODEL


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_scores_that_we_do_not_compute_are_refused(name):
    query = torch.zeros(1, 2, 1, 4)
    layout = layout_of(chain(1, [0])).layout
    with pytest.raises(SpecwireError, match=name):
        attend(torch.nn.Identity(), query, query, query, None, specwire_pass=layout, **{name: 1.0})
