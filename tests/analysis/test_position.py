"""Shares of variance on planted data, and the skip under a permutation."""

import numpy as np
import pytest
import torch
from checks import shake
from peft import get_peft_model
from tiny import tiny_of
from transformers import AutoModelForMaskedLM

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites
from preproj.analysis.position import PositionVariance, measure_position, permutation_deviation

GENERATOR = np.random.default_rng(0)
WINDOW = 12
TEXTS = torch.randint(3, 64, (6, WINDOW), generator=torch.Generator().manual_seed(0)).tolist()
HOSTS = ["llama", "gpt_neox", "gemma2", "gpt2"]


def shaken(base, dtype=None, **config):
    model = get_peft_model(base, PreProjConfig(**config)).eval()
    for _, _, layer in adapted_sites(model):
        shake(layer)
        layer.to(dtype)
    return model


def omega_squared(data):
    """Of (documents, positions, hidden)."""
    sums = PositionVariance()
    for document in torch.tensor(np.array(data)):
        sums.add(document)
    return sums.omega_squared()


def written_out(data):
    """The two-way table without sums of squares: its residuals entry by entry, and unbiased variances."""
    data = np.asarray(data, dtype=np.float64)
    documents, positions = data.shape[:2]
    position_means, document_means = data.mean(0, keepdims=True), data.mean(1, keepdims=True)
    grand = data.mean((0, 1), keepdims=True)
    residuals = data - position_means - document_means + grand
    error = (residuals**2).sum() / ((documents - 1) * (positions - 1))
    spread = ((position_means - grand) ** 2).sum() / (positions - 1)
    of_position = (spread - error / documents) * (positions - 1) / positions
    return of_position / (of_position + data.var(0, ddof=1).sum(-1).mean())


def test_the_share_equals_the_table_written_out():
    for shape in ((2, 2, 1), (3, 7, 4), (20, 5, 8)):
        data = GENERATOR.normal(3, 1, shape) + GENERATOR.normal(0, 2, (shape[0], 1, shape[2]))
        assert omega_squared(data) == pytest.approx(written_out(data), rel=1e-9)


def test_what_position_alone_decides_has_the_share_one():
    assert omega_squared(np.broadcast_to(GENERATOR.normal(size=(1, 9, 5)), (4, 9, 5))) == pytest.approx(1, abs=1e-12)


def test_noise_has_the_share_zero():
    assert omega_squared(GENERATOR.normal(size=(400, 16, 8))) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_mixture_has_the_known_share(share):
    position = GENERATOR.normal(size=(1, 16, 8))
    position -= position.mean(1, keepdims=True)
    position *= np.sqrt(share * 8 / (position**2).sum(-1).mean())  # of 8 entries of variance 1
    noise = np.sqrt(1 - share) * GENERATOR.normal(size=(2000, 16, 8))
    assert omega_squared(100 + position + noise) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("kind", ["independent", "of the document", "of the neighbours"])
def test_few_documents_do_not_raise_the_share_of_noise(kind):
    """The plain R² of three documents is a third; this one is right on average, however tokens hang together."""
    shares = []
    for _ in range(400):
        noise = GENERATOR.normal(size=(3, 12, 4))
        if kind == "of the document":
            noise += 2 * GENERATOR.normal(size=(3, 1, 4))
        if kind == "of the neighbours":
            noise = noise.cumsum(1)
        shares.append(omega_squared(noise))
    assert abs(np.mean(shares)) < 4 * np.std(shares) / np.sqrt(len(shares)) + 0.01


def test_a_large_mean_costs_no_digits():
    data = GENERATOR.normal(size=(5, 6, 3))
    assert omega_squared(data + 1e7) == pytest.approx(omega_squared(data), rel=1e-6)


def test_nothing_that_varies_and_a_single_document_have_no_share():
    assert omega_squared(np.full((3, 4, 2), 0.1)) is None
    assert omega_squared(GENERATOR.normal(size=(1, 4, 2))) is None


def test_the_sums_do_not_grow_with_the_number_of_documents():
    sums, sizes = PositionVariance(), []
    for document in torch.randn(30, 7, 5):
        sums.add(document)
        sizes.append(sum(held.numel() for held in vars(sums).values() if isinstance(held, torch.Tensor)))
    assert sizes == [7 * 5 + 5] * 30


# What attention adds to the residual stream, given what the module and the norm after it return.
BRANCH_END = {"gemma2": "post_attention_layernorm"}


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("host", HOSTS)
@torch.no_grad()
def test_shares_of_a_model_are_those_of_what_its_blocks_pass_on(host, rank):
    base = tiny_of(host)
    shake(base)
    model = shaken(base, skip_rank=rank)
    found = measure_position(model, TEXTS, WINDOW)
    for row, (name, attention, layer) in zip(found["layers"], adapted_sites(model), strict=True):
        block = base.get_submodule(name.rpartition(".")[0])
        end = getattr(block, BRANCH_END[host]) if host in BRANCH_END else attention
        seen: dict[str, list[np.ndarray]] = {"x_hat": [], "x_tilde": [], "attn_out": []}

        def x_of(args, kwargs):
            return (args[0] if args else kwargs["hidden_states"])[0].numpy()

        def first(output):
            return (output[0] if isinstance(output, tuple) else output)[0].numpy()

        handles = [
            attention.register_forward_pre_hook(
                lambda m, a, k, seen=seen: seen["x_hat"].append(x_of(a, k)), with_kwargs=True, prepend=True
            ),
            attention.register_forward_pre_hook(
                lambda m, a, k, seen=seen: seen["x_tilde"].append(x_of(a, k)), with_kwargs=True
            ),
            end.register_forward_hook(lambda m, a, out, seen=seen: seen["attn_out"].append(first(out)), prepend=True),
        ]
        for ids in TEXTS:
            model(torch.tensor([ids]))
        for handle in handles:
            handle.remove()
        weights = [linear.weight.numpy() for what, linear in layer.linears("default").items() if "skip" in what]
        data = {name: np.stack(vectors) for name, vectors in seen.items()}
        data["skip"] = data["x_tilde"] @ weights[0].T
        if rank is not None:
            data["skip"] = data["skip"] @ weights[1].T
        assert row["site"] == name
        for vectors in ("x_hat", "attn_out", "skip"):
            assert row[vectors] == pytest.approx(written_out(data[vectors]), rel=1e-6), vectors
    assert [row["layer"] for row in found["layers"]] == [0, 1]


@torch.no_grad()
def test_every_place_of_a_shared_module_counts_as_a_document():
    """ALBERT's attention is called once for each of its two layers; its x̂ is the residual too."""
    model = shaken(tiny_of("albert", auto=AutoModelForMaskedLM))
    ((_, attention, _),) = adapted_sites(model)
    seen = []
    handle = attention.register_forward_pre_hook(lambda m, a: seen.append(a[0][0].numpy()), prepend=True)
    for ids in TEXTS:
        model(torch.tensor([ids]))
    handle.remove()
    assert len(seen) == 2 * len(TEXTS)
    (row,) = measure_position(model, TEXTS, WINDOW)["layers"]
    assert row["x_hat"] == pytest.approx(written_out(np.stack(seen)), rel=1e-6)


@torch.no_grad()
def test_a_model_that_reads_positions_alone_has_the_share_one():
    base = tiny_of("gpt2")
    base.transformer.wte.weight.zero_()
    row = measure_position(shaken(base), TEXTS, WINDOW)["layers"][0]
    assert [row[name] for name in ("x_hat", "attn_out", "skip")] == pytest.approx([1, 1, 1], abs=1e-9)


def test_the_first_layer_of_a_model_with_rotary_positions_reads_none():
    texts = torch.randint(3, 64, (200, WINDOW), generator=torch.Generator().manual_seed(1)).tolist()
    row = measure_position(shaken(tiny_of("llama")), texts, WINDOW)["layers"][0]
    assert abs(row["x_hat"]) < 5e-3
    assert abs(row["skip"]) < 5e-3


def test_short_documents_are_skipped_and_counted():
    model = shaken(tiny_of("llama"))
    found = measure_position(model, [*TEXTS, [3, 4]], WINDOW)
    assert (found["window"], found["documents"], found["skipped"]) == (WINDOW, 6, 1)
    assert found["layers"] == measure_position(model, TEXTS, WINDOW)["layers"]


def test_without_a_skip_it_has_no_numbers():
    model = shaken(tiny_of("llama"), content_skip=False)
    rows = measure_position(model, TEXTS, WINDOW)["layers"]
    assert [row["skip"] for row in rows] == [None, None]
    assert all(row["x_hat"] is not None for row in rows)
    assert permutation_deviation(model, TEXTS[0]) == [None, None]


@pytest.mark.parametrize(
    ("base_dtype", "dtype", "round_off"),
    [(torch.float64, torch.float64, 1e-14), (torch.float32, torch.float32, 1e-5), (torch.bfloat16, None, 2**-7)],
    ids=["fp64", "fp32", "bf16 base"],
)
@pytest.mark.parametrize("host", [*HOSTS, "granite", "bert"])
def test_the_skip_commutes_with_a_permutation_of_tokens(host, base_dtype, dtype, round_off):
    for config in ({}, {"skip_rank": 3}, {"pre_projection": False}):
        deviations = permutation_deviation(shaken(tiny_of(host, dtype=base_dtype), dtype, **config), TEXTS[0])
        assert len(deviations) == 2
        assert max(deviations) <= round_off


def test_a_skip_that_reads_position_does_not_commute():
    model = shaken(tiny_of("llama"))
    (_, _, first), _ = adapted_sites(model)

    def rotate(linear, args, output):
        return output * torch.linspace(0, 1, output.shape[-2], dtype=output.dtype)[:, None]

    first.down["default"].register_forward_hook(rotate)
    deviations = permutation_deviation(model, TEXTS[0])
    assert deviations[0] > 0.01
    assert deviations[1] <= 1e-14


@pytest.mark.parametrize(
    "measure", [lambda m, t: measure_position(m, t, WINDOW), lambda m, t: permutation_deviation(m, t[0])]
)
def test_hooks_stay_only_while_measuring_and_not_after_an_error(measure):
    model = shaken(tiny_of("gemma2"))
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    measure(model, TEXTS)
    with pytest.raises(IndexError):
        measure(model, [[99] * WINDOW] * 2)  # no such token
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == before
