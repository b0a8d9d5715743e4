"""The row budget: what a row costs, how likely a draft token is to be accepted, and which ones are worth a row.

    cost.py         CostCurve: ms(rows, KV tokens), measured at start-up, refined by the steps it is shown
    acceptance.py   Acceptance: calibrates drafters' scores against outcomes
    forest.py       Forest: the drafts of one step concatenated, so that numpy handles all of them at once
    allocate.py     node_limit before drafting, allocate after it
    allocate_jit.py       its compiled part
    share_rows.py   share_rows: the same for drafts that the device finds by itself
    step_line.py    StepLine: milliseconds of steps by their number of sequences
    makespan.py     Lengths, last_shares: which sequences are likely to keep the others waiting
    bandit.py       Bandit: which way to run a step
    settings.py     BudgetSettings

The engine asks before and after drafting and then reports times and emitted tokens. Nothing here touches tokens,
tensors or clocks: a wrong estimate costs time and can never change a rollout.
"""
