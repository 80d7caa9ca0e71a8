"""Class statistics of a batch compared with explicit sums, and their addition."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from classwise.core.types import ClassStats, LossTerms


def terms_of(count: int, num_classes: int, seed: int, *, nat: bool = True, adv: bool = True) -> LossTerms:
    random = torch.Generator().manual_seed(seed)
    losses, logits = torch.rand(2, count, generator=random), torch.randn(2, count, num_classes, generator=random)
    return LossTerms(
        nat=losses[0],
        adv=losses[1],
        beta=6.0,
        logits_nat=logits[0] if nat else None,
        logits_adv=logits[1] if adv else None,
    )


def by_hand(terms: LossTerms, y: torch.Tensor, num_classes: int) -> ClassStats:
    """Sum example by example with plain numbers."""
    stats = ClassStats.zeros(num_classes)
    for i, label in enumerate(y.tolist()):
        stats.n[label] += 1
        stats.loss_nat[label] += float(terms.nat[i])
        stats.loss_adv[label] += float(terms.adv[i])
        stats.loss[label] += float(terms.nat[i]) + terms.beta * float(terms.adv[i])
        if terms.logits_nat is not None:
            p = terms.logits_nat[i].double().softmax(0)
            stats.n_nat[label] += 1
            stats.correct_nat[label] += int(p.argmax()) == label
            stats.ce_nat[label] -= p[label].log()
        if terms.logits_adv is not None:
            p = terms.logits_adv[i].double().softmax(0)
            stats.n_adv[label] += 1
            stats.correct_adv[label] += int(p.argmax()) == label
            stats.confusion_adv[label, int(p.argmax())] += 1
            stats.softmax_adv[label] += p
            stats.ce_adv[label] -= p[label].log()
    return stats


def same(one: ClassStats, other: ClassStats) -> None:
    for name in ClassStats.__slots__:
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.dtype == theirs.dtype, name
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@given(
    count=st.integers(1, 40),
    num_classes=st.sampled_from([2, 10, 100]),
    seed=st.integers(0, 1000),
    nat=st.booleans(),
    adv=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_batch_is_summed_by_class(count: int, num_classes: int, seed: int, nat: bool, adv: bool) -> None:
    terms = terms_of(count, num_classes, seed, nat=nat, adv=adv)
    y = torch.randint(num_classes, (count,), generator=torch.Generator().manual_seed(seed + 1))
    same(ClassStats.of(terms, y, num_classes), by_hand(terms, y, num_classes))


def test_addition_and_in_place_addition() -> None:
    parts = [(terms_of(size, 4, size), torch.arange(size) % 4) for size in (5, 1, 9)]
    total = ClassStats.zeros(4)
    expected = ClassStats.zeros(4)
    for terms, y in parts:
        before, batch = total, ClassStats.of(terms, y, 4)
        total += batch
        assert total is before
        expected = expected + by_hand(terms, y, 4)
        same(batch, by_hand(terms, y, 4))
    same(total, expected)
