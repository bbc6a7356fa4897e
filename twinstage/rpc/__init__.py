"""gRPC at the edge: conversion between protos and domain types, status mapping, servers and clients."""
