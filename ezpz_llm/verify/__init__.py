"""Questions about whole machines and runs: is it healthy, is the math right, where did the time go."""
