"""The indexes that decoded tokens choose from, without a model: against what their papers' formulas say, in loops."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch

from eval.baselines.indexes import ChunkMeanIndex, PageBoundsIndex, RandomIndex, TokenClusterIndex
from hf_tiered_cache.selection import DECODE_INDEXES
from hf_tiered_cache.selection import decode_index as shared
from hf_tiered_cache.selection.clusters import (
    ClusterIndex,
    nearest,
    segmented_kmeans,
    spherical_step,
    strided_directions,
)
from hf_tiered_cache.selection.decode_index import best_first, best_named, rank

KINDS = sorted(DECODE_INDEXES)
SHAPES = [  # kv heads, group, queries, dim, chunk tokens, tokens of each index
    (1, 1, 1, 4, 4, [37]),
    (2, 2, 1, 8, 8, [200]),
    (2, 3, 2, 8, 4, [90, 33]),
    (3, 1, 5, 4, 1, [50, 16, 7]),
    (1, 4, 1, 8, 16, [300, 1]),
    (2, 2, 3, 16, 3, [2, 64]),
]


def case(kv_heads, group, queries, dim, chunk_tokens, tokens, seed=0):
    """Draw keys of each index, and queries that search for some of them.

    An index rounds float32 keys, but not float64 keys (`ranking_dtype`).
    """
    generator = torch.Generator().manual_seed(seed + sum(tokens))
    keys = [torch.randn(kv_heads, count, dim, generator=generator).double() for count in tokens]
    query = 2 * torch.randn(kv_heads * group, queries, dim, generator=generator)
    return keys, query, chunk_tokens


def built(kind, keys, chunk_tokens):
    return [DECODE_INDEXES[kind].build(part, 1 if kind == "token_clusters" else chunk_tokens) for part in keys]


def counts_of(total):
    return sorted({1, 2, total // 3 or 1, total - 1 or 1, total})


def cut(keys, head, chunk_tokens):
    """Return the keys of each chunk, through all indexes, in float64."""
    return [
        segment_keys[head, begin : begin + chunk_tokens].double()
        for segment_keys in keys
        for begin in range(0, segment_keys.shape[1], chunk_tokens)
    ]


def softmax_of(values):
    most = max(values)
    powers = [math.exp(value - most) for value in values]
    return [power / sum(powers) for power in powers]


def served(query, head, kv_heads):
    """Return the queries of each query head of a KV head, in float64."""
    group = len(query) // kv_heads
    return query[head * group : (head + 1) * group].double()


def product(a, b):
    return sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))


def best_of(scores, count):
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def assert_ranked_by(weights, indexes, query, head):
    """Assert that a head's chunks are ranked by these weights, for a scale of 0.3."""
    for count in counts_of(len(weights)):
        assert rank(indexes, query, 0.3, count)[head].tolist() == best_of(weights, count)


def clusters_of(indexes, head):
    """Return centroid and chunks of each nonempty cluster, numbered through all indexes, by its first chunk."""
    clusters, first = [], 0
    for index in indexes:
        members = {}
        for chunk, cluster in enumerate(index.cluster_of[head].tolist()):
            members.setdefault(cluster, []).append(first + chunk)
        clusters += [(index.centroids[head, cluster].double(), chunks) for cluster, chunks in members.items()]
        first += index.chunks
    return clusters


@pytest.mark.parametrize("keep_representatives", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_clusters_are_taken_whole_and_the_last_is_cut(shape, keep_representatives):
    """The reference is KVDRIVE's selection in loops: clusters by centroids' softmax, then chunks by means."""
    keys, query, chunk_tokens = case(*shape)
    kind = type("Kind", (ClusterIndex,), {"keeps_representatives": keep_representatives})
    indexes = [kind.build(segment_keys, chunk_tokens) for segment_keys in keys]
    total = sum(index.chunks for index in indexes)
    for count in counts_of(total):
        chunks = rank(indexes, query, 0.7, count)
        assert (chunks.dtype, chunks.shape) == (torch.int64, (shape[0], count))
        for head in range(shape[0]):
            clusters, means = clusters_of(indexes, head), [chunk.mean(0) for chunk in cut(keys, head, chunk_tokens)]
            weights, rating = [0.0] * len(clusters), [0.0] * total
            for group_queries in served(query, head, shape[0]):
                for q in group_queries:
                    products = [0.7 * product(q, centroid) for centroid, _ in clusters]
                    weights = [a + b for a, b in zip(weights, softmax_of(products), strict=True)]
                    divisor = sum(math.exp(value) for value in products)
                    for i, mean in enumerate(means):
                        rating[i] += math.exp(0.7 * product(q, mean)) / divisor
            expected = []
            for number in best_of(weights, len(clusters)):
                members = clusters[number][1]
                expected += sorted(members, key=lambda i: (-rating[i], i)) if keep_representatives else members
            assert chunks[head].tolist() == expected[:count]


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_are_ranked_in_the_clusters_that_are_looked_into(shape):
    """The reference uses loops: clusters by a quarter of their bound, chunks by half of their own."""
    keys, query, chunk_tokens = case(*shape)
    indexes = built("cluster_boxes", keys, chunk_tokens)
    total = sum(index.chunks for index in indexes)
    for head in range(shape[0]):
        parts = cut(keys, head, chunk_tokens)
        bounds = [(part.amin(0), part.amax(0)) for part in parts]
        members = [chunks for _, chunks in clusters_of(indexes, head)]
        boxes = []  # of each cluster: centroid, least, largest
        for chunks in members:
            middles = [(bounds[i][0] + bounds[i][1]) / 2 for i in chunks]
            lows, highs = zip(*(bounds[i] for i in chunks), strict=True)
            boxes.append((sum(middles) / len(middles), torch.stack(lows).amin(0), torch.stack(highs).amax(0)))
        weights, rating = [0.0] * len(members), [0.0] * total
        for group_queries in served(query, head, shape[0]):
            for q in group_queries:
                products = [0.7 * part_of_the_way(q, *box, 0.25) for box in boxes]
                weights = [a + b for a, b in zip(weights, softmax_of(products), strict=True)]
                divisor = sum(math.exp(value) for value in products)
                for i, (low, high) in enumerate(bounds):
                    rating[i] += math.exp(0.7 * part_of_the_way(q, (low + high) / 2, low, high, 0.5)) / divisor
        for count in counts_of(total):
            candidates = [chunk for number in best_of(weights, len(members)) for chunk in members[number]]
            expected = sorted(candidates[: 4 * count], key=lambda i: (-rating[i], i))[:count]
            assert rank(indexes, query, 0.7, count)[head].tolist() == expected


def part_of_the_way(q, middle, low, high, share):
    """Interpolate between the product with a middle and the largest one of a key in a box."""
    return (1 - share) * product(q, middle) + share * product(torch.maximum(q * low, q * high), torch.ones_like(q))


def quests_bounds(q, chunk):
    """Return Quest's bound of the product of a query with the keys of a page."""
    low, high = chunk.amin(0).tolist(), chunk.amax(0).tolist()
    return [sum(max(x * a, x * b) for x, a, b in zip(q.tolist(), low, high, strict=True))]


def products(q, chunk):
    """Return the product of a query with each key of a chunk."""
    return [product(q, key) for key in chunk]


@pytest.mark.parametrize(("kind", "logits"), [("page_bounds", quests_bounds), ("keys", products)])
@pytest.mark.parametrize("shape", SHAPES)
def test_bounds_and_keys_rank_by_the_softmax_of_their_products(shape, kind, logits):
    keys, query, chunk_tokens = case(*shape)
    indexes = built(kind, keys, chunk_tokens)
    for head in range(shape[0]):
        chunks = cut(keys, head, chunk_tokens)
        weights = [0.0] * len(chunks)
        for q in chain.from_iterable(served(query, head, shape[0])):
            values = [logits(q, chunk) for chunk in chunks]
            shares = iter(softmax_of([0.3 * logit for logit in chain.from_iterable(values)]))
            weights = [weight + sum(next(shares) for _ in part) for weight, part in zip(weights, values, strict=True)]
        assert_ranked_by(weights, indexes, query, head)


@pytest.mark.parametrize("shape", SHAPES)
def test_chunk_means_are_shadowkvs(shape):
    keys, query, chunk_tokens = case(*shape)
    most = 3 if chunk_tokens > 1 else 0  # a single token points where its mean does
    indexes = [ChunkMeanIndex.build(segment_keys, chunk_tokens, outliers=most) for segment_keys in keys]
    for head in range(shape[0]):
        parts = cut(keys, head, chunk_tokens)
        cosines = [
            min(product(key, part.mean(0)) / float(key.norm() * part.mean(0).norm()) for key in part) for part in parts
        ]
        for count in counts_of(len(parts)):
            chunks = rank(indexes, query, 0.7, count)
            always = sorted(range(len(parts)), key=lambda i: (cosines[i], i))
            always = always[: min(most, max(index.chunks for index in indexes), count // 4)]
            candidates = [i for i in range(len(parts)) if i not in always]
            weights = [0.0] * len(candidates)
            for position in range(shape[2]):
                query_weights = [
                    softmax_of([0.7 * product(group_queries[position], parts[i].mean(0)) for i in candidates])
                    for group_queries in served(query, head, shape[0])
                ]
                weights = [a + max(column) for a, column in zip(weights, zip(*query_weights, strict=True), strict=True)]
            expected = [candidates[i] for i in best_of(weights, count - len(always))]
            assert chunks[head].tolist() == always + expected


def test_one_query_head_keeps_quests_order():
    """If no heads share keys, softmax changes nothing: pages are ranked by their bounds."""
    keys, query, _ = case(1, 1, 1, 8, 16, [400])
    index = PageBoundsIndex.build(keys[0], 16)
    pages = keys[0][0].unflatten(0, (25, 16))
    bounds = torch.maximum(query[0, 0] * pages.amax(1), query[0, 0] * pages.amin(1)).sum(1)
    chunks = rank([index], query, None, index.chunks)
    assert chunks[0].tolist() == bounds.argsort(descending=True).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_chunks_are_chosen_once(kind, shape):
    keys, query, chunk_tokens = case(*shape)
    indexes = built(kind, keys, chunk_tokens)
    total = sum(index.chunks for index in indexes)
    assert rank(indexes, query, None, total).sort(dim=1).values.tolist() == [list(range(total))] * shape[0]


@pytest.mark.parametrize("kind", ["clusters", "token_clusters", "page_bounds", "keys", "random"])
def test_a_larger_count_only_adds(kind):
    keys, query, chunk_tokens = case(2, 2, 1, 8, 4, [300, 70])
    indexes = built(kind, keys, chunk_tokens)
    ranking = rank(indexes, query, None, sum(index.chunks for index in indexes))
    for count in range(1, ranking.shape[1]):
        assert torch.equal(rank(indexes, query, None, count), ranking[:, :count])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_twice_and_after_storing(kind):
    keys, query, chunk_tokens = case(2, 2, 2, 8, 4, [130, 50])
    first, second = (built(kind, keys, chunk_tokens) for _ in range(2))
    stored_indexes = [DECODE_INDEXES[kind].from_tensors(index.tensors(), index.chunk_tokens) for index in first]
    expected = rank(first, query, None, 9)
    for indexes in (second, stored_indexes):
        assert torch.equal(rank(indexes, query, None, 9), expected)
        assert all(
            torch.equal(tensor, index.tensors()[name])
            for index, second_index in zip(first, indexes, strict=True)
            for name, tensor in second_index.tensors().items()
        )
    assert [index.chunks for index in stored_indexes] == [index.chunks for index in first]
    assert [index.nbytes for index in stored_indexes] == [
        sum(t.nbytes for t in index.tensors().values()) for index in first
    ]


@pytest.mark.parametrize("kind", ["page_bounds", "chunk_means", "keys", "random"])
def test_several_indexes_are_as_one(kind):
    """The result does not depend on where the keys were cut."""
    keys, query, _ = case(2, 2, 1, 8, 4, [64, 128, 40])
    count = 25
    joint_ranking = rank(built(kind, [torch.cat(keys, 1)], 4), query, None, count)
    parts = rank(built(kind, keys, 4), query, None, count)
    assert torch.equal(joint_ranking, parts)


def test_of_equals_the_first_wins():
    scores = torch.tensor([[0.0, -0.0, 1.0, -math.inf, 1.0, -2.0], [-1.5, -1.5, -1e-30, 0.0, -0.0, 3e38]])
    expected = scores.argsort(dim=1, descending=True, stable=True)
    for count in range(1, 7):
        assert best_first(scores, count).tolist() == expected[:, :count].tolist()
    index = PageBoundsIndex.build(torch.ones(1, 32, 4), 4)
    assert rank([index, index], torch.ones(2, 1, 4), None, 16).tolist() == [list(range(16))]


@pytest.mark.parametrize("kind", ["clusters", "cluster_boxes"])
def test_of_equal_chunks_the_first_are_selected(kind):
    """All chunks of a cluster have the same weight, and here the same representative, too."""
    index = DECODE_INDEXES[kind].build(torch.ones(1, 2400, 4), 8)
    for count in (1, 2, 5, 90, 300):
        assert rank([index], torch.ones(2, 1, 4), None, count).tolist() == [list(range(count))]


def test_the_best_are_the_same_by_either_way_of_selecting(monkeypatch):
    """Devices use topk and the CPU uses NumPy, with ties, zeros of both signs and -inf."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(3, 200, generator=generator).mul_(4).round_().div_(2)  # many are equal
    scores[:, ::17] = -math.inf
    names = torch.stack([torch.randperm(1 << 20, generator=generator)[:200] for _ in range(3)])
    for count in (0, 1, 57, 199, 200):
        best = best_named(scores, names, count)
        for row in range(3):
            expected = sorted(range(200), key=lambda i: (-scores[row, i].item(), names[row, i].item()))[:count]
            assert best[row].tolist() == names[row, expected].tolist()
        with monkeypatch.context() as patch:
            patch.setattr(shared, "_largest_on_cpu", shared._largest_on_device)
            again = best_named(scores, names, count)
        assert torch.equal(best, again)


def test_what_gets_next_to_nothing_keeps_its_rank():
    """Weights far below the smallest float32 are ranked by logits, not by position."""
    keys = torch.linspace(0, 1, 64).reshape(1, 64, 1) * torch.ones(1, 64, 4)
    chunks = rank([PageBoundsIndex.build(keys, 4)], torch.full((1, 1, 4), 1000.0), None, 16)
    assert chunks.tolist() == [list(range(15, -1, -1))]


def test_the_objective_never_falls_inside_a_segment():
    points = torch.randn(3, 500, 8, generator=torch.Generator().manual_seed(1))
    directions = strided_directions(points, 40)
    reached = torch.full((3,), -math.inf)
    for _ in range(12):
        own = directions.take_along_dim(nearest(points, directions)[..., None], 1)
        objective = (points * own).sum((1, 2))
        assert (objective >= reached - 1e-3).all()
        reached, directions = objective, spherical_step(points, directions)
    assert torch.allclose(directions.norm(dim=-1), torch.ones(3, 40), atol=1e-5)


@pytest.mark.parametrize(("points", "clusters", "segment"), [(1, 1, 8), (7, 7, 3), (100, 30, 17), (64, 2, 5)])
def test_clusters_part_the_points_and_centroids_are_their_means(points, clusters, segment):
    data = torch.randn(2, points, 4, generator=torch.Generator().manual_seed(points)) + 3
    centroids, cluster_of = segmented_kmeans(data, clusters, segment, 4)
    assert centroids.shape == (2, clusters, 4)
    for head in range(2):
        for number in range(clusters):
            members = data[head, cluster_of[head] == number]
            mean = members.mean(0) if len(members) else data[head].mean(0)
            assert torch.allclose(centroids[head, number], mean, atol=1e-5)


def test_each_chunk_has_a_cluster():
    keys, _, _ = case(2, 1, 1, 8, 4, [400])
    index = ClusterIndex.build(keys[0], 4)
    assert index.centroids.shape[1] == 25  # one for 16 tokens
    for head in range(2):
        assert sorted(chain(*(chunks for _, chunks in clusters_of([index], head)))) == list(range(100))


def test_empty_clusters_are_never_chosen():
    """Equal keys go to one cluster: the others, whose centroids would score the same, hold nothing."""
    index = ClusterIndex.build(torch.ones(1, 128, 4), 4)
    assert sorted(index.sizes()[0].tolist()) == [0, 0, 0, 0, 0, 0, 0, 32]
    assert rank([index, index], torch.ones(1, 1, 4), None, 40).tolist() == [list(range(40))]


@pytest.mark.parametrize("kind", ["clusters", "cluster_boxes"])
def test_planted_clusters_are_found(kind):
    """Runs of chunks alternate around eight directions; a query for one selects its chunks first."""
    generator = torch.Generator().manual_seed(2)
    directions = torch.linalg.qr(torch.randn(16, 16, generator=generator))[0][:8] * 6
    topic = torch.randint(8, (64,), generator=generator)
    keys = directions[topic].repeat_interleave(4, 0) + 0.3 * torch.randn(256, 16, generator=generator)
    index = DECODE_INDEXES[kind].build(keys[None], 4)
    for topic_number in range(8):
        members = (topic == topic_number).nonzero().flatten().tolist()
        chunks = rank([index], directions[topic_number].reshape(1, 1, 16), None, len(members))
        assert sorted(chunks[0].tolist()) == members


def test_a_random_choice_follows_the_query_and_is_even():
    index, second_index = RandomIndex.build(torch.ones(2, 400, 4), 4), RandomIndex.build(torch.ones(2, 400, 4), 4)
    generator = torch.Generator().manual_seed(3)
    times = torch.zeros(2, 200)
    for _ in range(300):
        query = torch.randn(2, 1, 4, generator=generator)
        chunks = rank([index, second_index], query, None, 20)
        assert torch.equal(chunks, rank([second_index, index], query, None, 20))
        times.scatter_add_(1, chunks, torch.ones(2, 20))
    assert (times - 30).abs().max() < 25  # 30 each on average, by 5.2 off as a rule


def test_boxes_find_a_key_that_its_chunk_hides():
    """One key in 800 is looked for, and the others point away: their mean is next to nothing, not so their box."""
    generator = torch.Generator().manual_seed(4)
    keys = 0.4 * torch.randn(1, 800, 16, generator=generator)
    query = torch.randn(1, 1, 16, generator=generator)
    keys[0, 400:408] = -0.15 * query[0]
    keys[0, 403] = query[0, 0]
    ranking = {kind: rank(built(kind, [keys], 8), query, None, 5)[0].tolist() for kind in ("clusters", "cluster_boxes")}
    assert ranking["cluster_boxes"][0] == 50
    assert 50 not in ranking["clusters"]


@pytest.mark.parametrize("kind", KINDS)
def test_in_pieces_it_is_the_same(kind, monkeypatch):
    keys, query, chunk_tokens = case(4, 2, 6, 8, 4, [200, 40])
    at_once = rank(built(kind, keys, chunk_tokens), query, None, 20)
    for name in ("decode_index", "clusters"):
        monkeypatch.setattr(f"hf_tiered_cache.selection.{name}.LARGEST", 2000)  # a head, some positions, some rows
    assert len(list(shared.head_slices(keys[0]))) == 4
    pieces = rank(built(kind, keys, chunk_tokens), query, None, 20)
    assert torch.equal(at_once, pieces)


def test_an_index_of_float32_keys_is_rounded_and_selects_nearly_the_same():
    generator = torch.Generator().manual_seed(0)
    keys, query = torch.randn(2, 4096, 64, generator=generator), 3 * torch.randn(14, 1, 64, generator=generator)
    for kind in ("cluster_boxes", "clusters", "page_bounds", "chunk_means"):
        rounded, exact = (DECODE_INDEXES[kind].build(segment_keys, 8) for segment_keys in (keys, keys.double()))
        assert rounded.nbytes < 0.3 * exact.nbytes, kind  # 2 bytes instead of 8
        best = [rank([index], query, None, 64) for index in (rounded, exact)]
        common = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(*best, strict=True)]
        assert min(common) >= 60, (kind, common)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_keys(kind):
    keys, query, chunk_tokens = case(2, 2, 1, 8, 4, [203])
    index = built(kind, [keys[0].bfloat16()], chunk_tokens)[0]
    tensors = [tensor for tensor in index.tensors().values() if tensor.is_floating_point()]
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors if tensor.shape[-1] >= 8 and tensor.dim() == 3)
    chunks = rank([index], query.bfloat16(), None, index.chunks)
    assert chunks.sort(dim=1).values.tolist() == [list(range(index.chunks))] * 2


def test_clusters_of_tokens_have_chunks_of_one():
    keys, *_ = case(2, 2, 1, 8, 4, [40])
    with pytest.raises(ValueError, match="1 token"):
        TokenClusterIndex.build(keys[0], 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_merged_indexes_rank_as_the_several_do(kind, shape):
    keys, query, chunk_tokens = case(*shape)
    indexes = built(kind, keys, chunk_tokens)
    merged_index = DECODE_INDEXES[kind].merged(indexes)
    total = sum(index.chunks for index in indexes)
    assert sum(index.chunks for index in merged_index) == total
    assert len(merged_index) == 1 or not issubclass(DECODE_INDEXES[kind], ClusterIndex)
    for count in counts_of(total):
        assert torch.equal(rank(merged_index, query, 0.7, count), rank(indexes, query, 0.7, count))
