"""From learners to generators: the content of a publish, its way, when it counts, and the proof that it arrived."""
