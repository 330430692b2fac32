//go:build unix && !linux

package main

import "syscall"

// endWithUs leaves the process in our group, so that it gets the terminal's Ctrl-C. These systems do not
// end a process with its parent.
func endWithUs() *syscall.SysProcAttr { return nil }
