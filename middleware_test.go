package inbox_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
)

// The outcome table is tested by the kit, see inboxtest/memory_test.go. Here is what the kit does not see:
// log lines, and what the middleware itself costs.

func consumer(string) string { return "ledger" }

func TestLogs(t *testing.T) {
	t.Parallel()
	nothing := func(*message.Message) ([]*message.Message, error) { return nil, nil }
	failing := func(*message.Message) ([]*message.Message, error) { return nil, errors.New("no funds") }
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	for name, c := range map[string]struct {
		handler    message.HandlerFunc
		ctx        context.Context
		deliveries int
		debug      []string
		errors     int
	}{
		"processed, then duplicates": {nothing, context.Background(), 3, []string{"Message processed", "Message duplicate", "Message duplicate"}, 0},
		// The router logs the error itself.
		"failed": {failing, context.Background(), 1, []string{"Message failed"}, 0},
		// The router hides it.
		"cancelled": {nothing, cancelled, 1, nil, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			logger := watermill.NewCaptureLogger()
			m, err := inbox.NewMiddleware(inboxtest.NewMemoryRepository(), inbox.Options{Consumer: consumer, Logger: logger})
			if err != nil {
				t.Fatal(err)
			}
			for range c.deliveries {
				_, _ = m.Middleware(c.handler)(message.NewMessageWithContext(c.ctx, "payment-7", nil))
			}
			var debug []string
			for _, line := range logger.Captured()[watermill.DebugLogLevel] {
				debug = append(debug, line.Msg)
				if line.Fields["message_uuid"] != "payment-7" || line.Fields["consumer"] != "ledger" || line.Fields["message_id"] != "payment-7" {
					t.Errorf("fields %v", line.Fields)
				}
			}
			if !slices.Equal(debug, c.debug) {
				t.Errorf("debug lines %q, want %q", debug, c.debug)
			}
			if got := logger.Captured()[watermill.ErrorLogLevel]; len(got) != c.errors {
				t.Errorf("error lines %v, want %d", got, c.errors)
			}
			if got := logger.Captured()[watermill.InfoLogLevel]; len(got) != 0 {
				t.Errorf("info lines %v", got)
			}
		})
	}
}

func TestErrorText(t *testing.T) {
	t.Parallel()
	err := &inbox.Error{Step: "claim", Key: inbox.Key{Consumer: "ledger", MessageID: "a\nb"}, Err: inbox.ErrInFlight}
	if got := err.Error(); !strings.HasPrefix(got, `inbox: claim "ledger"/"a\nb": claim not obtained`) {
		t.Errorf("the text is %q", got)
	}
}

// instant is a repository that does nothing, so that only the middleware is measured.
type instant struct{}

func (instant) Claim(context.Context, inbox.ClaimParams) (inbox.Transaction, *inbox.Record, error) {
	return instant{}, nil, nil
}
func (instant) MarkSent(context.Context, []inbox.Record) ([]inbox.Record, error) { return nil, nil }
func (instant) Store(context.Context, inbox.StoreParams) (time.Time, error)      { return time.Now(), nil }
func (instant) Commit(context.Context) error                                     { return nil }
func (instant) Rollback() error                                                  { return nil }

func instantHandler(t testing.TB) func() {
	t.Helper()
	m, err := inbox.NewMiddleware(instant{}, inbox.Options{Consumer: consumer})
	if err != nil {
		t.Fatal(err)
	}
	handler := m.Middleware(func(*message.Message) ([]*message.Message, error) { return nil, nil })
	// As a subscriber does, the message has a context that can end.
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	msg := message.NewMessageWithContext(ctx, "payment-7", nil)
	return func() {
		if _, err := handler(msg); err != nil {
			t.Error(err)
		}
	}
}

func TestAllocations(t *testing.T) {
	if got := testing.AllocsPerRun(1000, instantHandler(t)); got > 12 {
		t.Errorf("the middleware makes %.0f allocations per message, want at most 12", got)
	} else {
		t.Logf("%.0f allocations per message", got)
	}
}

// BenchmarkMiddleware measures the middleware's own cost; the bar is 2 microseconds.
func BenchmarkMiddleware(b *testing.B) {
	handle := instantHandler(b)
	b.ReportAllocs()
	for range b.N {
		handle()
	}
}
