//go:build unix && !linux

package main

import "syscall"

// endWithParent does nothing: these systems do not tell us that our parent ended.
func endWithParent() {}

// endWithUs does nothing, for the same reason.
func endWithUs(*syscall.SysProcAttr) {}
