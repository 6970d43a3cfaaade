"""The rollout buffer: fresh rollouts, drawn by recency and retired after use."""
