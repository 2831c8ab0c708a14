"""What watches training and decides: depth, settings, policy, guard, watchdog, checks, profiling."""
