//go:build unix

package servers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
)

// errStopped is returned by the start of a server whose folder is gone.
var errStopped = errors.New("servers: the server was stopped for good")

// openLog opens the file that takes the output of the server's programs.
func openLog(f *folder) (*os.File, error) {
	log, err := os.OpenFile(f.join("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("servers: %w", err)
	}
	return log, nil
}

// startError is the error of a server that did not start, with the end of its
// log unless the caller has given up.
func startError(ctx context.Context, what string, f *folder, causes ...error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("servers: %s did not start: %w", what, context.Cause(ctx))
	}
	return fmt.Errorf("servers: %s did not start: %w", what, errors.Join(append(causes, f.logTail())...))
}

// logTail is the end of the server's log as an error, nil when there is none.
func (f *folder) logTail() error {
	const lines = 25
	content, err := os.ReadFile(f.join("log"))
	text := strings.TrimSpace(string(content))
	if err != nil || text == "" {
		return nil
	}
	all := strings.Split(text, "\n")
	return fmt.Errorf("the end of its log:\n%s", strings.Join(all[max(0, len(all)-lines):], "\n"))
}
