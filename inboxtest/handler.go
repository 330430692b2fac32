package inboxtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

// Handler is a handler of yours with what [TestHandler] needs around it.
type Handler struct {
	// Repository is the one in which the messages are claimed, with its schema in place, in the database
	// to which the handler writes.
	// Required.
	Repository inbox.Repository

	// Handle is the handler under test. Required, unless there is HandleNoPublish.
	Handle message.HandlerFunc

	// HandleNoPublish is the handler under test if it returns no messages. Required, unless there is Handle.
	HandleNoPublish message.NoPublishHandlerFunc

	// Message is the message to handle. Each delivery is a copy with its UUID, metadata and payload, and
	// with the values of its context, in which a deadline is set.
	// Required.
	Message *message.Message

	// State returns in words all that the handler writes, as it is committed: read through the pool,
	// outside of any transaction, in a fixed order. It must leave out what no two runs share: times,
	// random ids, numbers from a sequence (a sequence is not rolled back).
	// Required.
	State func(ctx context.Context) (string, error)

	// Options of the middleware, as in production. The router's handler name is "kit".
	Options inbox.Options

	// PublishTopic is the topic to which the handler's messages go. It matters if the handler asks for
	// it, and for the tables of an outbox.
	// Default: "events".
	PublishTopic string

	// Describe returns what two runs must have in common in a message that the handler returned. Set it
	// when the payload holds a time or a random id. UUIDs may always differ.
	// Default: the metadata and the payload.
	Describe func(*message.Message) string

	// Timeout is the deadline of each delivery. A handler that writes around its transaction may wait for
	// what the transaction holds, a lock or a pool's only connection; then this ends it.
	// Default: 10 seconds.
	Timeout time.Duration
}

// TestHandler tests whether the effect of a message stays "once" with this handler, whatever happens. It
// runs the handler behind the inbox in a real router, with one fault after the other, each in a subtest of
// its own: copies in sequence and in parallel; an error, a retry, a panic, runtime.Goexit and an ended context;
// a failing claim, store and commit, before it is done and after; a publish that fails after each number of
// messages (of many, the first and the last numbers); a transaction that is lost while the handler runs.
// After each fault the state must be the one before the message, or the one after it, never anything between.
// When the broker has delivered the message again, the state and the published messages must be what a run
// without faults gives.
//
// It finds
//   - writes around the transaction: through the pool, through another connection;
//   - a handler that commits or rolls back, or continues after a failed statement;
//   - use of the transaction after the handler has returned, by a goroutine that it left behind;
//   - errors that are ignored, of all its statements, or of one where the database then refuses the others (PostgreSQL);
//   - work that depends on what a rollback does not undo: a variable, the message itself, which Retry gives
//     to the handler again;
//   - messages acknowledged by the handler itself, and messages of one run that share a UUID.
//
// Each failure says what was expected and seen, the likely cause, and what to do.
//
// The constructor is called once for each fault, one after the other. Each time it must give the same fresh
// state (a schema, a file, emptied tables), make the handler again if it keeps anything in memory, and clean up
// by t.Cleanup.
//
// # What it does not see
//
//   - What State does not show, and what has no place in a database: mails, HTTP calls, messages that the
//     handler publishes by itself. They are sent once for each attempt.
//   - Branches that the message does not take. Test a message for each.
//   - One ignored error among several statements where the database lets the transaction go on, as SQLite does.
//   - What the handler leaves in the session: a lock that outlives the transaction, a SET.
//   - A write around the transaction by which nothing changes, and reads around it.
//   - A goroutine that writes later than a third of a second after the handler has returned, or whose late
//     write fails in every run: then its work is missing in the run without faults as well. A goroutine
//     that is in time by luck in every run.
func TestHandler(t *testing.T, constructor func(t *testing.T) Handler) {
	t.Helper()
	testHandler(t, constructor, func(t *testing.T, failure error) {
		t.Helper()
		t.Error(failure)
	})
}

// CheckHandler is [TestHandler], but returns the failures and leaves the test as it is: to test that a
// handler is not safe, or a helper that builds handlers.
func CheckHandler(t *testing.T, constructor func(t *testing.T) Handler) []error {
	t.Helper()
	var failures []error
	testHandler(t, constructor, func(_ *testing.T, failure error) { failures = append(failures, failure) })
	return failures
}

func (h *Handler) validate() error {
	switch {
	case h.Repository == nil:
		return errors.New("Handler.Repository is missing")
	case h.Handle == nil && h.HandleNoPublish == nil:
		return errors.New("Handler.Handle and Handler.HandleNoPublish are missing")
	case h.Handle != nil && h.HandleNoPublish != nil:
		return errors.New("Handler.Handle and Handler.HandleNoPublish are both set, want one")
	case h.Message == nil:
		return errors.New("Handler.Message is missing")
	case h.State == nil:
		return errors.New("Handler.State is missing")
	case h.Timeout < 0:
		return fmt.Errorf("Handler.Timeout is negative: %s", h.Timeout)
	}
	return h.Options.Validate()
}

func (h *Handler) setDefaults() {
	if h.Handle == nil {
		consume := h.HandleNoPublish
		h.Handle = func(msg *message.Message) ([]*message.Message, error) { return nil, consume(msg) }
	}
	if h.Describe == nil {
		h.Describe = content
	}
	h.PublishTopic = cmp.Or(h.PublishTopic, publishTopic)
	h.Timeout = cmp.Or(h.Timeout, 10*time.Second)
}

// content is all of a message but its UUID.
func content(msg *message.Message) string {
	return fmt.Sprintf("%q %q", msg.Metadata, msg.Payload)
}
