"""Small families of tasks with a verifiable reward, for the shipped configs and the benchmarks."""
