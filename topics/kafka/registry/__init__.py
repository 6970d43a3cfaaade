"""A schema registry: subjects and schemas of our topics there, their registration, and the ids that records carry."""
