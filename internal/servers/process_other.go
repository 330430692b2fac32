//go:build unix && !linux

package servers

import "syscall"

// setParentDeath does nothing: these systems do not tell a program that its
// parent has ended.
func setParentDeath(*syscall.SysProcAttr, syscall.Signal) {}
