"""Where a step's rows go: how long a row count takes, how likely a guess is right, which guesses pay for their row.

    cost.py         CostCurve: ms(rows, KV tokens), measured at start-up, refined by the steps it is shown
    acceptance.py   Acceptance: what a drafter's scores turn out to be worth
    forest.py       Forest: the drafts of one step laid end to end, so that numpy sees all of them at once
    allocate.py     node_limit before drafting, allocate after it
    choice.py       what of it is compiled
    host_gap.py     HostGap: how long a machine waits for its host before a drafted step
    makespan.py     Lengths, last_shares: who is likely to keep the others waiting
    draft_backoff.py  DraftBackoff: in which steps drafting is tried at all
    bandit.py       Bandit: which drafter, in what shape
    settings.py     BudgetSettings

The engine asks before and after drafting and reports times and emitted tokens afterwards. Nothing here touches tokens,
tensors or clocks: a wrong estimate costs time and can never change a rollout.
"""
