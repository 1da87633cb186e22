"""What is made with the library and is not part of it: sweeps, reproductions, leaderboard, benchmarks, generators."""
