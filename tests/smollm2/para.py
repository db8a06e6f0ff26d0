"""A fixed text whose log-likelihood under SmolLM2-135M-Instruct is known."""

PARA = (
    "The quick growth of cities in the nineteenth century changed how people lived and worked. "
    "Factories needed many hands, and families moved from farms to crowded streets where the air "
    "was dark with smoke. New laws slowly improved water, housing and schools, and by the end of "
    "the century most large towns had parks, trams and public libraries. Historians still argue "
    "about whether ordinary workers were better off than their parents had been, because wages "
    "rose while life in the slums stayed short and hard."
)
MEAN_NLL = 3.770
"""Measured with two independent float32 forwards: 3.7696 and 3.7696 nats per token."""
