"""Run-ahead: rollouts of later steps, started early in rows that would otherwise be idle."""
