"""Roles: actors beside generators and learner that compute something about each group as it lands."""
