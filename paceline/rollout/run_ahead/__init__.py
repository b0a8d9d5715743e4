"""Run-ahead: rollouts of later steps, begun early in rows that would otherwise be idle."""
