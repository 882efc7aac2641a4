"""The course's data, models and milestones."""
