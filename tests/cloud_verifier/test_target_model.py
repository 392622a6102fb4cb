"""One packed pass over many sessions against transformers' own forward."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny_models import CONTEXT, VOCAB, build, save
from transformers import DynamicCache

from cloud_verifier import target_model
from cloud_verifier.attention import attend
from cloud_verifier.target_model import Segment, TargetModel
from shared.faults import FaultKind, SpecwireError

KINDS = ("llama", "qwen3", "mistral", "gpt2")
TOLERANCE = 1e-5  # of the largest logits, which are about
LARGEST = 7.5


@dataclass
class Pair:
    """A target of ours and the stock model in the same weights."""

    target: TargetModel
    stock: torch.nn.Module

    @torch.inference_mode()
    def own(self, tokens: list[int]) -> torch.Tensor:
        """[n, VOCAB] logits of the stock model after each token, with its own cache."""
        cache = DynamicCache(config=self.stock.config)
        logits = self.stock(input_ids=torch.tensor([tokens]), cache=cache, use_cache=True).logits
        return logits[0, :, :VOCAB]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small gain nothing from threads, and lose much on a busy machine."""
    num = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num)


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("llama"), "llama")


def make_pair(folder: Path, kind: str, **options) -> Pair:
    model = build(kind)
    save(folder, model)
    return Pair(
        TargetModel.load(str(folder), **{"dtype": "float32", "num_slots": 600, **options}), model.eval()
    )


def close(ours: torch.Tensor, own: torch.Tensor) -> None:
    torch.testing.assert_close(ours, own, rtol=0, atol=TOLERANCE * LARGEST)


@dataclass
class Chat:
    """A session as the verifier keeps it: what is committed to the pool, and where."""

    tokens: list[int] = field(default_factory=list)
    slots: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def extend(self, target: TargetModel, new: list[int], num_logits: int, hint: bool) -> Segment:
        after = int(self.slots[-1]) if hint and len(self.slots) else None
        self.slots = np.concatenate((self.slots, target.pool.allocate(len(new), after=after)))
        self.tokens = self.tokens + new
        return Segment(np.array(new), self.slots, num_logits)

    def roll_back(self, target: TargetModel, length: int) -> None:
        target.pool.release(self.slots[length:])
        self.slots, self.tokens = self.slots[:length], self.tokens[:length]


@pytest.mark.parametrize("seed", range(3))
def test_any_interleaving_equals_the_models_own_forward(pair, seed):
    rng = np.random.default_rng(seed)
    target, chats = pair.target, [Chat() for _ in range(7)]
    for _ in range(8):
        chosen = rng.permutation(7)[: rng.integers(1, 8)]
        segments, expected = [], []
        for chat in (chats[i] for i in chosen):
            if chat.tokens and rng.random() < 0.5:
                chat.roll_back(target, int(rng.integers(0, len(chat.tokens))))
            most = 40 if rng.random() < 0.2 else 7
            if len(chat.tokens) + most > CONTEXT:
                chat.roll_back(target, 0)
            new = rng.integers(0, VOCAB, rng.integers(1, most + 1)).tolist()
            num_logits = int(rng.integers(0, len(new) + 1))
            segments.append(chat.extend(target, new, num_logits, hint=bool(rng.random() < 0.5)))
            expected.append(pair.own(chat.tokens)[len(chat.tokens) - num_logits :])
        close(target.forward(segments), torch.cat(expected))
    for chat in chats:
        chat.roll_back(target, 0)
    assert target.pool.num_used == 0


def test_one_session_alone_in_scattered_slots(pair):
    target, tokens = pair.target, list(range(3, 40))
    slots = target.pool.allocate(100)[::-2][: len(tokens)].copy()
    try:
        logits = target.forward([Segment(np.array(tokens), slots, len(tokens))])
        close(logits, pair.own(tokens))
        close(target.forward([Segment(np.array(tokens[-1:]), slots, 1)]), pair.own(tokens)[-1:])
    finally:
        target.pool.release(np.arange(100) if slots.max() < 100 else np.flatnonzero(target.pool._refs))


def test_a_chunk_of_a_prompt_beside_blocks(pair):
    rng = np.random.default_rng(3)
    target, chats = pair.target, [Chat() for _ in range(5)]
    for chat, length in zip(chats, (90, 3, 25, 26, 60), strict=True):
        target.forward([chat.extend(target, rng.integers(0, VOCAB, length).tolist(), 0, hint=True)])
    sizes = (6, 50, 1, 6, 6)
    segments = [
        chat.extend(target, rng.integers(0, VOCAB, n).tolist(), n, hint=False)
        for chat, n in zip(chats, sizes, strict=True)
    ]
    expected = [pair.own(chat.tokens)[-n:] for chat, n in zip(chats, sizes, strict=True)]
    close(target.forward(segments), torch.cat(expected))
    for chat in chats:
        chat.roll_back(target, 0)


def test_sessions_that_share_slots_read_the_same_prefix(pair):
    target = pair.target
    shared = target.pool.allocate(10)
    target.forward([Segment(np.arange(10), shared, 0)])
    segments, expected = [], []
    for token in (20, 30):
        own = target.pool.allocate(2)
        segments.append(Segment(np.array([token, token + 1]), np.concatenate((shared, own)), 2))
        expected.append(pair.own([*range(10), token, token + 1])[-2:])
    close(target.forward(segments), torch.cat(expected))
    for segment in segments:
        target.pool.release(segment.slots[10:])
    target.pool.release(shared)


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_of_tokens_equals_its_paths(pair, seed):
    rng = np.random.default_rng(seed)
    target = pair.target
    chat, other = Chat(), Chat()
    target.forward([chat.extend(target, rng.integers(0, VOCAB, 11).tolist(), 0, hint=True)])
    prompt, num = list(chat.tokens), 9
    parents = np.array([int(rng.integers(-1, i)) if i else -1 for i in range(num)])
    tokens = rng.integers(0, VOCAB, num).tolist()
    chain = chat.extend(target, tokens, num, hint=False)
    beside = other.extend(target, rng.integers(0, VOCAB, 13).tolist(), 2, hint=False)
    ours = target.forward([beside, Segment(chain.tokens, chain.slots, num, parents=parents)])
    close(ours[:2], pair.own(other.tokens)[-2:])
    for index in range(num):
        path, at = [], index
        while at >= 0:
            path.append(tokens[at])
            at = int(parents[at])
        close(ours[2 + index : 3 + index], pair.own(prompt + path[::-1])[-1:])
    for session in (chat, other):
        session.roll_back(target, 0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_the_models_own_forward(tmp_path):
    pair = make_pair(tmp_path, "llama", attention="flex")
    rng = np.random.default_rng(5)
    chats = [Chat() for _ in range(4)]
    for sizes in ((30, 7, 1, 12), (5, 6, 1, 2), (1, 1, 1, 1)):
        segments = [
            chat.extend(pair.target, rng.integers(0, VOCAB, n).tolist(), n, hint=False)
            for chat, n in zip(chats, sizes, strict=True)
        ]
        expected = [pair.own(chat.tokens)[-n:] for chat, n in zip(chats, sizes, strict=True)]
        close(pair.target.forward(segments), torch.cat(expected))


def test_a_session_with_nan_changes_no_other(tmp_path):
    pair = make_pair(tmp_path, "llama", num_slots=64)
    target = pair.target
    bad, short, long = (target.pool.allocate(n) for n in (8, 4, 20))
    assert 0 in bad  # where padding by zeros would read
    with torch.no_grad():
        target._model.get_input_embeddings().weight[5] = float("nan")
    tokens = np.arange(6, 26)
    together = [Segment(np.full(8, 5), bad, 8), Segment(tokens, long, 20), Segment(tokens[:4], short, 4)]
    logits = target.forward(together)
    assert logits[:8].isnan().all()
    close(logits[8:28], pair.own(tokens.tolist()))
    close(logits[28:], pair.own(tokens[:4].tolist()))
    # Now short, long and bad share a call, and short is padded.
    last = [Segment(np.array([5]), bad, 1), Segment(tokens[-1:], long, 1), Segment(tokens[3:4], short, 1)]
    logits = target.forward(last)
    close(logits[1:], torch.cat((pair.own(tokens.tolist())[-1:], pair.own(tokens[:4].tolist())[-1:])))


def test_logits_do_not_depend_on_the_batch_in_the_linear_layers(llama):
    """Alone and beside others, a session's greedy choice and its logits agree far beyond the tolerance."""
    target = llama.target
    slots = [target.pool.allocate(9) for _ in range(3)]
    segments = [
        Segment(np.arange(start, start + 9), s, 9) for start, s in zip((3, 20, 40), slots, strict=True)
    ]
    together = target.forward(segments)
    alone = torch.cat([target.forward([segment]) for segment in segments])
    assert torch.equal(together.argmax(1), alone.argmax(1))
    close(together, alone)
    for s in slots:
        target.pool.release(s)


def test_what_the_model_says_about_itself(pair):
    target = pair.target
    assert target.vocab_size == VOCAB
    assert target.max_context == CONTEXT
    assert target.eos_ids == (2,)
    assert target.bos_id == 1
    assert "w60" in target.tokenizer_json
    assert target.chat_template == "{{ messages[0].content }}"
    assert target.dtype == torch.float32
    target.warm_up()
    assert target.pool.num_used == 0


def test_ids_that_the_model_lacks_are_minus_infinity(tmp_path):
    save(tmp_path, build("llama"), vocab=70)
    target = TargetModel.load(str(tmp_path), dtype="float32", num_slots=32)
    slots = target.pool.allocate(2)
    logits = target.forward([Segment(np.array([3, 4]), slots, 2)])
    assert logits.shape == (2, 70)
    assert logits[:, :64].isfinite().all()
    assert (logits[:, 64:] == float("-inf")).all()


@pytest.mark.parametrize(("dtype", "native"), [("bfloat16", True), ("bfloat16", False), ("float16", True)])
def test_half_precision_is_near_float32(llama, tmp_path, dtype, native):
    target = make_pair(tmp_path, "llama", dtype=dtype, native=native).target
    assert target.dtype == getattr(torch, dtype)
    tokens = list(range(3, 23))
    logits = target.forward([Segment(np.array(tokens), target.pool.allocate(20), 20)])
    computed_in = torch.float32 if (dtype, native) == ("bfloat16", True) else target.dtype
    assert logits.dtype == target.pool.keys[0].dtype == computed_in
    own = llama.own(tokens)
    assert float((logits.float() - own).abs().max()) < 0.1 * float(own.abs().max())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bfloat16_rounds_the_weights_and_nothing_else(tmp_path, kind):
    rounded = build(kind)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    save(tmp_path, rounded)
    pairs = [
        Pair(TargetModel.load(str(tmp_path), dtype=dtype, num_slots=32), rounded.eval())
        for dtype in ("bfloat16", "float32")
    ]
    tokens = list(range(3, 23))
    narrow, wide = (
        pair.target.forward([Segment(np.array(tokens), pair.target.pool.allocate(20), 20)]) for pair in pairs
    )
    assert torch.equal(narrow, wide)
    close(narrow, pairs[0].own(tokens))


def test_a_bfloat16_model_with_layers_of_another_kind_runs_in_bfloat16(tmp_path):
    target = make_pair(tmp_path, "gpt2", dtype="bfloat16").target
    assert target.dtype == target.pool.keys[0].dtype == torch.bfloat16


def test_without_the_compiled_layers_the_logits_are_the_same(llama, tmp_path):
    target = make_pair(tmp_path, "llama", native=False).target
    tokens = list(range(3, 23))
    close(target.forward([Segment(np.array(tokens), target.pool.allocate(20), 20)]), llama.own(tokens))


def test_the_pool_takes_its_size_from_bytes_and_else_from_free_memory(tmp_path):
    save(tmp_path, build("llama"))
    each = 3 * 2 * 2 * 8 * 4  # layers, key and value, heads, dimension, bytes
    target = TargetModel.load(str(tmp_path), dtype="float32", kv_cache_bytes=100 * each + 5)
    assert target.pool.num_slots == 100
    target = TargetModel.load(str(tmp_path), dtype="float32", max_sessions=3)
    assert target.pool.num_slots == 3 * CONTEXT


def refused(folder: Path, kind: FaultKind = FaultKind.UNSUPPORTED_MODEL, **options) -> str:
    with pytest.raises(SpecwireError) as caught:
        TargetModel.load(str(folder), **{"dtype": "float32", "num_slots": 64, **options})
    assert caught.value.kind == kind
    assert caught.value.remedy
    return str(caught.value)


def test_a_sliding_window_is_refused_beyond_the_window(tmp_path):
    save(tmp_path, build("mistral", sliding_window=32))
    assert "--max-context 32" in refused(tmp_path)
    assert TargetModel.load(str(tmp_path), dtype="float32", num_slots=64, max_context=32).max_context == 32


def test_layers_that_slide_are_refused(tmp_path):
    layers = ["full_attention", "sliding_attention", "full_attention"]
    save(tmp_path, build("qwen3", use_sliding_window=True, sliding_window=16, layer_types=layers))
    assert "16 tokens" in refused(tmp_path)


def _hybrid() -> torch.nn.Module:
    config = transformers.Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    )
    return transformers.Qwen3NextForCausalLM(config)


def _bloom() -> torch.nn.Module:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)
    )


def _mamba() -> torch.nn.Module:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    )


def _encoder_decoder() -> torch.nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=64, **sizes))


@pytest.mark.parametrize("make", [_hybrid, _bloom, _mamba, _encoder_decoder])
def test_models_that_cannot_be_served_are_refused(tmp_path, make: Callable[[], torch.nn.Module]):
    save(tmp_path, make())
    refused(tmp_path)


def test_soft_capped_scores_are_refused(tmp_path):
    config = transformers.Gemma2Config(
        **{k: v for k, v in build("llama").config.to_dict().items() if k in ("vocab_size", "hidden_size")},
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        sliding_window=64,
        query_pre_attn_scalar=16,
    )
    save(tmp_path, transformers.Gemma2ForCausalLM(config))
    assert "softcap" in refused(tmp_path)


def test_a_model_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    """The trial passes find what no list of refusals foresees: here, attention that forgets its scaling."""
    save(tmp_path, build("llama"))

    def unscaled(module, query, key, value, mask, scaling=None, **kwargs):
        return attend(module, query, key, value, mask, scaling=1.0, **kwargs)

    monkeypatch.setattr(target_model, "attend", unscaled)
    try:
        assert "differ" in refused(tmp_path)
    finally:  # transformers keeps one table for all models of the process
        transformers.AttentionInterface.register("specwire", attend)


@pytest.mark.parametrize(
    "options", [{"dtype": "int3"}, {"device": "cuda"}, {"device": "meta"}, {"attention": "fast"}]
)
def test_arguments_that_make_no_sense_are_refused(tmp_path, options):
    if options == {"device": "cuda"} and torch.cuda.is_available():
        options = {"device": "meta"}
    refused(tmp_path, FaultKind.BAD_REQUEST, **options)
