"""From learners to generators: what a publish sends, which way, when it counts, and the proof that it arrived."""
