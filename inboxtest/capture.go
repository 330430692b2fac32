// What an inbox logs and what it reports to its observer, kept for the cases to look at.

package inboxtest

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/ThreeDotsLabs/watermill"

	inbox "github.com/devmappa/watermill-inbox"
)

// capture is a logger that keeps its lines.
type capture struct {
	fields watermill.LogFields
	lines  *capturedLines
}

type capturedLines struct {
	mutex sync.Mutex
	error []string
	debug []string
	other []string
}

func newCapture() *capture { return &capture{lines: &capturedLines{}} }

func (c *capture) add(to *[]string, text string, err error, fields watermill.LogFields) {
	c.lines.mutex.Lock()
	defer c.lines.mutex.Unlock()
	*to = append(*to, fmt.Sprint(text, " ", err, " ", c.fields.Add(fields)))
}

func (c *capture) Error(text string, err error, fields watermill.LogFields) {
	c.add(&c.lines.error, text, err, fields)
}
func (c *capture) Info(text string, fields watermill.LogFields) {
	c.add(&c.lines.other, text, nil, fields)
}
func (c *capture) Debug(text string, fields watermill.LogFields) {
	c.add(&c.lines.debug, text, nil, fields)
}
func (c *capture) Trace(text string, fields watermill.LogFields) {
	c.add(&c.lines.other, text, nil, fields)
}
func (c *capture) With(fields watermill.LogFields) watermill.LoggerAdapter {
	return &capture{fields: c.fields.Add(fields), lines: c.lines}
}

func (c *capture) errors() []string {
	c.lines.mutex.Lock()
	defer c.lines.mutex.Unlock()
	return slices.Clone(c.lines.error)
}

// observed keeps what the middleware reports to its observer.
type observed struct {
	mutex sync.Mutex
	list  []inbox.Observation
}

func (o *observed) add(_ context.Context, observation inbox.Observation) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	o.list = append(o.list, observation)
}

func (o *observed) all() []inbox.Observation {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	return slices.Clone(o.list)
}

func (o *observed) last() inbox.Observation {
	all := o.all()
	if len(all) == 0 {
		return inbox.Observation{}
	}
	return all[len(all)-1]
}
