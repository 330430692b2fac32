package inbox

import (
	"errors"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// TooOldOptions guard against a message that comes back after its record was deleted: without them it runs
// again, unnoticed.
//
// The guard begins before the end of the retention, by a quarter of it, but at most an hour and at least a minute, because
// the producer's clock may be ahead of the database's. The age is judged after the claim. A message whose record is found is a duplicate, however old it is. One
// that is older than the retention and has no record may have been processed before, or may be delivered for
// the first time, late: a long backlog and a replay of history are hit as well. To let such messages run, use
// a middleware without the guard for them, or a Time that returns false.
type TooOldOptions struct {
	// Retention is how long records are kept, the same that the [Cleaner] has. The zero value turns the guard
	// off.
	Retention Retention

	// Time returns when the message was produced; false when that is not known, and then the message runs and
	// [Observation].AgeUnknown is set. A time more than an hour ahead, or before 2016, is not known either: it is no
	// time, or of a wrong clock. See [TimeFromMetadata] for ids that do not tell.
	// Default: the time in a message id that is a UUIDv7 or a ULID with at least one letter.
	Time func(*message.Message) (time.Time, bool)

	// Refuse makes a message that is too old a permanent error that matches [ErrTooOld], for the poison queue.
	// Nothing of it is stored.
	// Default: false. It runs, with a line at error level and [Observation].TooOld.
	Refuse bool
}

// Validate returns an error when the options cannot be used.
func (o TooOldOptions) Validate() error {
	if !o.on() {
		if o.Time != nil || o.Refuse {
			return errors.New("inbox: TooOld has no Retention")
		}
		return nil
	}
	return o.Retention.Validate()
}

func (o TooOldOptions) on() bool {
	return o.Retention.Default != 0 || len(o.Retention.Consumers) > 0
}

func (o *TooOldOptions) setDefaults(messageID func(*message.Message) string) {
	if o.Time == nil {
		o.Time = func(msg *message.Message) (time.Time, bool) {
			id := messageID(msg)
			if at, ok := UUIDv7.Time(id); ok {
				return at, true
			}
			if strings.Trim(id, "0123456789") == "" {
				return time.Time{}, false // a number of 26 digits is hardly a ULID
			}
			return ULID.Time(id)
		}
	}
}

// TimeFromMetadata returns a function that reads a message's time from a metadata field, in RFC 3339. A message
// without the field, or with another text in it, has no known time.
func TimeFromMetadata(field string) func(*message.Message) (time.Time, bool) {
	return func(msg *message.Message) (time.Time, bool) {
		at, err := time.Parse(time.RFC3339, msg.Metadata.Get(field))
		return at, err == nil
	}
}

// earliestID is before the first ids with a time in them.
var earliestID = time.Date(2016, 1, 1, 0, 0, 0, 0, time.UTC)

// judgeAge is called for a message that has no record.
func (a *attempt) judgeAge() error {
	guard := a.options.TooOld
	if !guard.on() {
		return nil
	}
	retention := guard.Retention.For(a.inner.key.Consumer)
	if retention == KeepForever {
		return nil
	}
	at, known := guard.Time(a.msg)
	if !known || at.Before(earliestID) || time.Until(at) > maxClockDifference {
		a.observation.AgeUnknown = true
		return nil
	}
	if time.Since(at) <= retention-min(clockTolerance(retention), retention/4) {
		return nil
	}
	a.observation.TooOld = true
	if guard.Refuse {
		return ErrTooOld
	}
	a.options.Logger.Error("Message is older than the retention and runs, it may have been processed before", nil,
		a.fields().Add(watermill.LogFields{"produced_at": at, "retention": retention}))
	return nil
}
