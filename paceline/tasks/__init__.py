"""What to solve: every task makes items from (seed, index) and scores texts strictly."""
