"""Every number of the report, defined once: the page's glossary. eval/README.md adds formulas and examples."""

DEFINITIONS = (
    (
        "tokens per round (τ)",
        "Committed tokens of a round, with the target's own repair or bonus token, clipped at the end of "
        "the answer and at the token budget.",
    ),
    (
        "accepted prefix length",
        "Accepted draft tokens of a full round, without repair or bonus. Full rounds are those that "
        "neither end of answer nor budget has clipped; there, the mean plus 1 equals tokens per round.",
    ),
    (
        "marginal survival",
        "P(first i draft tokens accepted): over all full rounds, whether or not they proposed i. Of a tree, P(a path "
        "of i tokens accepted). 1 plus their sum is tokens per full round.",
    ),
    (
        "conditional acceptance",
        "P(i-th accepted | first i−1 accepted): over full rounds that accepted those and proposed an i-th token. Of a "
        "tree, over those that were i deep anywhere: a path that ends early counts as a miss.",
    ),
    (
        "decode speedup",
        "Plain decoding's seconds per committed token divided by the contender's, prefill left out, on "
        "the same conversations.",
    ),
    (
        "speedup with prefill",
        "The same with everything from the prompt to the last token, divided by all new tokens.",
    ),
    (
        "tokens/s",
        "All new tokens divided by all seconds, prefill included. A rate of sums, not a mean of rates.",
    ),
    (
        "accepted draft tokens/s",
        "Draft tokens that reached the answer, divided by all seconds.",
    ),
    (
        "ms per token",
        "Median and 95th percentile over answers of an answer's decode time divided by its tokens.",
    ),
    (
        "c, v, o",
        "Draft seconds per proposed token, verification seconds per round and other seconds per round, "
        "all divided by the seconds of one plain decoding step. A tree has no c: its draft is measured as a whole.",
    ),
    (
        "break-even τ",
        "Tokens per round at which a round costs what plain decoding of as many tokens costs: k·c + v + o, or with the "
        "whole draft in the place of k·c.",
    ),
    (
        "predicted speedup",
        "τ ÷ (k·c + v + o), with the mean number of proposed tokens as k. Its difference from the "
        "measured one is time that no part accounts for. For smaller k: 1 + Σ survival up to k, at the "
        "same c, v and o; for chains alone.",
    ),
    (
        "tree",
        "A draft with several candidates for a position. It is as many tokens deep as its longest path, and has as "
        "many nodes as candidates in all.",
    ),
    (
        "block",
        "Block verification (arXiv 2403.10444): a chain is judged as a whole. It keeps the target's law and accepts "
        "as many tokens as judging one by one, or more.",
    ),
    (
        "LOSSY",
        "A rule that changes the law of the output, shown for comparison. Typical acceptance (arXiv 2401.10774) keeps "
        "what the target finds plausible. Never part of a verdict.",
    ),
    (
        "verdict",
        "On when the decode speedup of the fastest contender has an interval above 1 over enough conversations (6, and "
        "more where the fastest of several was chosen) and its rule keeps the target's law; otherwise off. The "
        "fastest of several is chosen after the fact, which flatters it: the interval it needs is wider then "
        "(Bonferroni), as wide for a drafter by itself as for all that were measured. A verdict by kind is one of as "
        "many as there are kinds with enough conversations, and its interval is as much wider. Everything is off where "
        "a check found output that is not the target's, greedily (near ties apart) or in law: that is a fault of "
        "decoding, which all contenders share.",
    ),
    (
        "leaderboard",
        "Contenders by tokens per device-second: all new tokens divided by all seconds, prefill included. Each is set "
        "against the one above it on the same conversations; where the interval of their ratio holds 1, or there are "
        "fewer than 6 conversations, the two share a rank (1=). Neighbours are compared, so the first and the last of "
        "a long tie may differ. LOSSY contenders, and those whose output was found not to be the target's, have none.",
    ),
    (
        "memory",
        "The target's weights; the drafter's own, without what it borrows from the target; and the most that the "
        "target's cache and the drafter's state on the device (a cache, say) held after a round of any answer, in MiB.",
    ),
    (
        "training",
        "Wall time of the run that trained the drafter, validation included, on the machine that it ran on, and the "
        "answer tokens it was trained on, every epoch anew. A dash where no record of that run lies beside the bundle.",
    ),
    (
        "a target of its own",
        "A drafter may be trained together with its target, which then has another law than the original. It decodes "
        "with that target, is compared with plain decoding of it, named plain (drafter), and has no part in the "
        "ranking, nor in the verdict on the original. In a report on its bundle alone, plain is that target's.",
    ),
    (
        "drift",
        "How far such a target has moved: both read the answers that the original gives by greedy plain decoding, and "
        "their laws at T = 1 are compared at every token. KL(original ‖ moved) in nats a token; total variation, the "
        "share of tokens that the best coupling would draw differently; and the share of positions whose likeliest "
        "token is the same.",
    ),
    (
        "α",
        "Acceptance probability Σ min(p, q) over the full vocabulary after the sampler's transforms; "
        "teacher-forced means on given answers, without decoding.",
    ),
    (
        "α where decoding went",
        "The same at draft positions that were tested while decoding: those behind accepted drafts. What is easy is "
        "visited more often, so it lies above the teacher-forced one where difficulty varies.",
    ),
    (
        "bands",
        "Answers by the turn they answer, by the length of their prompt, and rounds by where in the answer they stand.",
    ),
    (
        "coverage",
        "Share of the target's likeliest tokens that are in the drafter's vocabulary; no other can be drafted.",
    ),
    (
        "calibration, ECE",
        "In ten bins of the drafter's confidence (its largest probability), the share accepted beside the mean "
        "confidence. ECE is the mean distance between the two, weighted by count. 0 is a drafter whose confidence "
        "is how often it is accepted.",
    ),
    (
        "law test",
        "Where a sampled token falls in the target's law, tokens ordered by probability and ties broken at random, is "
        "uniform if and only if it was drawn from it. A χ² test over 20 bins, p-values adjusted for the number of "
        "contenders (Holm), differs below 0.001. Plain decoding is tested too, as a control. Detectable is the "
        "shift in total variation that this many tokens reveal nine times in ten.",
    ),
    (
        "largest paying batch",
        "The largest batch size at which the decode speedup has an interval above 1, over at least 6 batches.",
    ),
    (
        "sample size",
        "Conversations at which tokens per round would have an interval of ±0.1, ±0.05 or ±0.02: intervals narrow as "
        "one over the root of their number.",
    ),
    (
        "energy",
        "Joules that the device's own counter ran up over an answer, divided by its tokens. A dash where it has none.",
    ),
    (
        "timing",
        "The device is synchronised at both ends of every part; contenders take turns on the same "
        "conversations; warm-up is left out.",
    ),
)
