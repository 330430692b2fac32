package inbox

import (
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
)

// RouterOptions are what stands around the inbox in a router, see [Middleware.AddTo].
type RouterOptions struct {
	// PoisonPublisher publishes messages that can never succeed to PoisonTopic, so that they do not spin.
	// Default: nil, no poison queue: such a message comes back without end, or until the broker drops it.
	PoisonPublisher message.Publisher

	// PoisonTopic is required with PoisonPublisher.
	PoisonTopic string

	// ShouldPoison decides which errors go to the poison queue.
	// Default: ShouldPoison.
	ShouldPoison func(err error) bool

	// Retry runs a failed attempt again, in a transaction of its own. A ShouldRetry of yours is asked in addition to
	// [ShouldRetry]; ResetContextOnRetry is always on.
	// Default: the zero value stands for 5 retries, after 100 ms and then 3 times the pause before, at most 10 s.
	Retry middleware.Retry

	// Timeout ends each attempt's context.
	// Default: 0, none.
	Timeout time.Duration
}

// Validate returns an error when the options cannot be used.
func (o RouterOptions) Validate() error {
	switch {
	case o.PoisonPublisher == nil && (o.PoisonTopic != "" || o.ShouldPoison != nil):
		return errors.New("inbox: PoisonTopic or ShouldPoison is set without a PoisonPublisher")
	case o.PoisonPublisher != nil && o.PoisonTopic == "":
		return errors.New("inbox: PoisonPublisher has no PoisonTopic")
	case o.Timeout < 0:
		return fmt.Errorf("inbox: Timeout is negative: %s", o.Timeout)
	}
	o.setDefaults(nil)
	r := o.Retry
	switch {
	case r.MaxRetries < 0 || r.MaxElapsedTime < 0 || r.RandomizationFactor < 0 || r.RandomizationFactor >= 1:
		return errors.New("inbox: Retry has a negative number, or a RandomizationFactor of 1 or more")
	case r.MaxRetries > 0 && (r.InitialInterval <= 0 || r.MaxInterval < r.InitialInterval || r.Multiplier < 1):
		return fmt.Errorf("inbox: Retry does not wait: InitialInterval %s, MaxInterval %s, Multiplier %v; want a positive one, one that is not shorter, and at least 1",
			r.InitialInterval, r.MaxInterval, r.Multiplier)
	}
	return nil
}

func (o *RouterOptions) setDefaults(logger watermill.LoggerAdapter) {
	if o.ShouldPoison == nil {
		o.ShouldPoison = ShouldPoison
	}
	r := &o.Retry
	if r.MaxRetries == 0 && r.InitialInterval == 0 && r.MaxInterval == 0 && r.Multiplier == 0 && r.MaxElapsedTime == 0 {
		r.MaxRetries, r.InitialInterval, r.MaxInterval, r.Multiplier = 5, 100*time.Millisecond, 10*time.Second, 3
	}
	if r.Logger == nil {
		r.Logger = logger
	}
	r.ResetContextOnRetry = true
	users := r.ShouldRetry
	r.ShouldRetry = func(params middleware.RetryParams) bool {
		return ShouldRetry(params) && (users == nil || users(params))
	}
}

// AddTo adds the inbox and what must stand around it: to the router, or only to the given handlers. From the outside to
// the inside:
//
//	Delivery        one delivery has one key
//	PoisonQueue     with ShouldPoison
//	Retry           with ShouldRetry: each attempt has a transaction of its own
//	RestoreContext  for the poison queue's publisher, since Timeout leaves a dead context
//	Timeout
//	Recoverer       inside of Retry, so that a handler that always panics is poisoned
//	the inbox
//
// and the publisher decorator, see [Middleware.DecoratePublisher], once for each router.
//
// A middleware that was added to the router before is outside of all this, and one that is added after it is inside of the
// transaction. Whatever changes, adds or drops returned messages belongs inside. Watermill's Deduplicator, InstantAck and
// IgnoreErrors must go: they acknowledge messages whose work is not committed. Nobody can see other middlewares, so none of
// this is checked.
//
// Call it before the router runs. It returns an error for options that cannot be used, and adds nothing then.
func (m *Middleware) AddTo(router *message.Router, options RouterOptions, handlers ...*message.Handler) error {
	if router == nil {
		return errors.New("inbox: router is nil")
	}
	if err := options.Validate(); err != nil {
		return err
	}
	options.setDefaults(m.options.Logger)
	chain := []message.HandlerMiddleware{m.Delivery}
	if options.PoisonPublisher != nil {
		poison, err := middleware.PoisonQueueWithFilter(options.PoisonPublisher, options.PoisonTopic, options.ShouldPoison)
		if err != nil {
			return fmt.Errorf("inbox: %w", err)
		}
		chain = append(chain, poison)
	}
	chain = append(chain, options.Retry.Middleware, RestoreContext)
	if options.Timeout > 0 {
		chain = append(chain, middleware.Timeout(options.Timeout))
	}
	chain = append(chain, middleware.Recoverer, m.Middleware)

	if _, decorated := m.routers.LoadOrStore(router, true); !decorated {
		router.AddPublisherDecorators(m.DecoratePublisher)
	}
	for _, handler := range handlers {
		handler.AddMiddleware(chain...)
	}
	if len(handlers) == 0 {
		router.AddMiddleware(chain...)
	}
	return nil
}
