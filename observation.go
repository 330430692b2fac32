package inbox

import (
	"errors"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// Outcome is what became of an attempt to process a message.
type Outcome string

// The outcomes. What is replayed and duplicate is acknowledged unless publishing fails; a processed message too.
const (
	Processed Outcome = "processed" // the handler's work is committed
	Duplicate Outcome = "duplicate" // it was processed before
	Replayed  Outcome = "replayed"  // it was processed before, and its stored messages are published again
	Failed    Outcome = "failed"    // an error or a panic; nothing was committed, as far as is known
)

// Observation is what became of one attempt, for metrics. See [Options].Observe.
type Observation struct {
	// Key is the message's. With Outcome Failed it may be one that was refused.
	Key Key

	Outcome Outcome

	// Err is what the router is given. nil after a panic.
	Err error

	// Wait is how long the claim took: the wait for a connection, for another copy that was being handled, and
	// the database's work; with Outcome Failed also how long it took to fail. 0 when no claim was tried.
	Wait time.Duration

	// Duration is how long the attempt took in all.
	Duration time.Duration

	// Age is how long before this copy the message was processed, of a duplicate or a replay. It is the
	// difference of the database's clock and ours, and not negative. The longest one seen is the least that a
	// retention must be.
	Age time.Duration

	// TooOld: the message is older than the retention and has no record, see [TooOldOptions], or older than what
	// its table can tell.
	TooOld bool

	// AgeUnknown: the guard is on, and the message runs because its time is not known.
	AgeUnknown bool
}

// MarksObservation is what became of one try to mark stored messages as sent. See [Options].ObserveMarks.
type MarksObservation struct {
	// Records is how many records were marked, and Pending how many wait for the next try: new ones, those of a failed
	// statement, and those that somebody else has locked.
	Records, Pending int

	// Dropped is how many were not kept for want of room since the last observation: their messages are sent once more.
	Dropped int

	// Err is why nothing was marked.
	Err error
}

// report logs and observes the attempt at its end.
func (a *attempt) report(err error) {
	if a.claimed {
		a.log("Message "+string(a.observation.Outcome), nil)
	}
	if a.options.Observe != nil {
		a.observation.Key = a.inner.key
		a.observation.Wait = a.waited
		a.observation.Duration = time.Since(a.started)
		a.observation.Err = err
		a.observation.TooOld = a.observation.TooOld || errors.Is(err, ErrTooOld)
		a.options.Observe(a.outer, a.observation)
	}
}

func (a *attempt) log(text string, fields watermill.LogFields) {
	if _, nop := a.options.Logger.(watermill.NopLogger); !nop {
		a.options.Logger.Debug(text, a.fields().Add(fields))
	}
}

func (a *attempt) fields() watermill.LogFields {
	return watermill.LogFields{
		"message_uuid": a.msg.UUID,
		"handler_name": message.HandlerNameFromCtx(a.outer),
		"consumer":     a.inner.key.Consumer,
		"message_id":   a.inner.key.MessageID,
		"wait":         a.waited,
	}
}
