package inbox_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	inbox "github.com/devmappa/watermill-inbox"
)

// failing fails its first deletion; the second one tells that the cleaner went on.
type failing struct {
	instant
	calls    atomic.Int32
	wentOn   chan struct{}
	deletion error
}

func (f *failing) DeleteProcessed(context.Context, time.Duration, int) (int, error) {
	switch f.calls.Add(1) {
	case 1:
		return 0, f.deletion
	case 2:
		close(f.wentOn)
	}
	return 0, nil
}

func (f *failing) CountUnsent(context.Context, time.Duration) (int, error) { return 3, nil }

// The cleaner is in nobody's way when the database is away: it says so and goes on with the next pass.
func TestCleanerGoesOnAfterAFailedPass(t *testing.T) {
	t.Parallel()
	logger := watermill.NewCaptureLogger()
	repository := &failing{wentOn: make(chan struct{}), deletion: errors.New("the database is away")}
	cleaner, err := inbox.NewCleaner(repository, inbox.CleanerOptions{Retention: time.Hour, Interval: time.Millisecond, Logger: logger})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- cleaner.Run(ctx) }()
	<-repository.wentOn
	cancel()
	if err := <-done; err != context.Canceled {
		t.Fatalf("Run returned %v", err)
	}
	if got := logger.Captured()[watermill.ErrorLogLevel]; len(got) != 1 || !errors.Is(got[0].Err, repository.deletion) {
		t.Fatalf("error lines %v", got)
	}
	for _, line := range logger.Captured()[watermill.InfoLogLevel] {
		if line.Fields["unsent"] != 3 {
			t.Fatalf("line %v does not count what is kept", line)
		}
	}
}
