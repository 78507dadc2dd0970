"""Launch plans: sites, dialects of launchers, placement, binding, and environment."""
