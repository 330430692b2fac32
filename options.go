package inbox

import (
	"context"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

const (
	defaultClaimTimeout   = 30 * time.Second
	defaultPublishBackOff = 20 * time.Second
)

// Options of the middleware. The zero value is useful.
type Options struct {
	// Consumer returns the consumer name for a router's handler name. A handler that is renamed keeps
	// its records when the function maps the new name to the old one. An empty result is refused, per
	// message.
	// Default: the handler name itself.
	Consumer func(handlerName string) string

	// MessageID returns the message's id. An empty result is refused, per message. Never use a hash of
	// the payload: two equal payments are two payments.
	// Default: MessageUUID.
	MessageID func(*message.Message) string

	// Outbox publishes what the handler returns, inside of the handler's transaction, to the handler's
	// publish topic; the router is then given nothing to publish, and nothing is stored with the record.
	// It must write through the transaction that it finds in each message's context, as
	// outbox.Publisher does.
	// Default: nil. The messages are stored with the record, and the router publishes them after the commit.
	Outbox message.Publisher

	// ClaimTimeout bounds the wait for a connection and for another copy of the message that is being
	// handled. It does not bound the handler; Watermill's Timeout does.
	// Default: 30 seconds.
	ClaimTimeout time.Duration

	// PublishBackOff is how long the router's publish of what a handler returned is tried again before the message is
	// nacked, see [Middleware.DecoratePublisher]. It must be shorter than the time after which the subscriber or the
	// broker delivers an unanswered message again: some do so after 30 seconds.
	// Default: 20 seconds.
	PublishBackOff time.Duration

	// TooOld guards against messages that come back after their record was deleted.
	// Default: off.
	TooOld TooOldOptions

	// Observe is called once at the end of each attempt, with the message's context, by the goroutine that handles the
	// message and before the router continues, so it must be fast.
	// Default: nil.
	Observe func(ctx context.Context, observation Observation)

	// ObservePublish is called when the router's publish of what a handler returned has succeeded or is given up, and when
	// a message was acknowledged without it; with the context of the delivery.
	// Default: nil.
	ObservePublish func(ctx context.Context, observation PublishObservation)

	// ObserveMarks is called after each try to mark stored messages as sent, by one goroutine at a time, with a
	// context that ends when the marks are given up.
	// Default: nil.
	ObserveMarks func(ctx context.Context, observation MarksObservation)

	// Logger gets one line per message at debug level. At error level it gets only what the router does
	// not log: attempts that ended because the message's context was cancelled, stored messages that go
	// to another topic than they were stored for, marks that failed, and messages that are too old and run.
	// Default: watermill.NopLogger.
	Logger watermill.LoggerAdapter
}

// Validate returns an error when the options cannot be used.
func (o Options) Validate() error {
	if o.ClaimTimeout < 0 {
		return fmt.Errorf("inbox: ClaimTimeout is negative: %s", o.ClaimTimeout)
	}
	if o.PublishBackOff < 0 {
		return fmt.Errorf("inbox: PublishBackOff is negative: %s", o.PublishBackOff)
	}
	return o.TooOld.Validate()
}

func (o *Options) setDefaults() {
	if o.Consumer == nil {
		o.Consumer = func(handlerName string) string { return handlerName }
	}
	if o.MessageID == nil {
		o.MessageID = MessageUUID
	}
	o.TooOld.setDefaults(o.MessageID)
	if o.ClaimTimeout == 0 {
		o.ClaimTimeout = defaultClaimTimeout
	}
	if o.PublishBackOff == 0 {
		o.PublishBackOff = defaultPublishBackOff
	}
	if o.Logger == nil {
		o.Logger = watermill.NopLogger{}
	}
}
